"""`python -m posttrain.models.survey flops` as a user types it, and docs/tables/flops.md."""

import json
import re
import subprocess
import sys

from conftest import ROOT
from torch import nn
from transformers import Qwen3Config

from posttrain.flops import size
from posttrain.models.architectures import architectures, tiny
from posttrain.models.survey import __main__ as survey


def survey_flops(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "posttrain.models.survey", "flops", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def cells(line):
    return [cell.strip() for cell in line.strip("|\n").split("|")]


def test_named_architectures_one_of_them_refused():
    run = survey_flops("qwen3_5", "mamba2", "falcon", "minimax", "--json")
    assert run.returncode == 1
    assert "counting 4/4 minimax" in run.stderr
    hybrid, state, dense, refused = json.loads(run.stdout)["checks"]
    assert [c["verdict"] for c in (hybrid, state, dense, refused)] == ["counted"] * 3 + ["refused"]
    assert [c["convention"] for c in (hybrid, state, dense, refused)] == ["useful", "none", "dense", None]
    assert all(c["counted"] == c["counter"] > 0 and c["reason"] is None for c in (hybrid, state, dense))
    assert sum(hybrid["parts"].values()) == hybrid["counted"]
    assert refused["counted"] is None and "MiniMaxLightningAttention" in refused["reason"]


def documented():
    rows = map(cells, (ROOT / "docs" / "tables" / "flops.md").read_text().splitlines())
    return {row[0]: row for row in rows if len(row) == 6 and row[0] in architectures()}


def test_three_quarters_are_counted_and_each_other_refused_by_its_module():
    verdicts = {}
    for name in architectures():
        try:
            model = tiny(name)
        except Exception as error:  # of whatever kind: transformers cannot build it
            verdicts[name] = f"not built: {type(error).__name__}"
            continue
        for module in model.modules():
            if isinstance(getattr(module, "top_k", None), int):
                module.top_k = min(module.top_k, 2)
        try:
            size(model)
            verdicts[name] = "counted"
        except ValueError as error:  # any other is a fault
            verdicts[name] = f"refused: {error}"
            modules = {type(module).__name__ for module in model.modules()}
            assert any(word in modules for word in re.findall(r"\w+", str(error))), verdicts[name]
    built = [verdict for verdict in verdicts.values() if not verdict.startswith("not built")]
    assert built.count("counted") >= 0.75 * len(built)
    table = documented()
    assert {name: row[5] for name, row in table.items() if "not built" not in row[5]} == {
        name: verdict for name, verdict in verdicts.items() if "not built" not in verdict
    }
    assert table.keys() == verdicts.keys()


def test_rows_are_those_of_the_documentation():
    """A few rows of the table, made again: if one differs, docs/tables/flops.md says how to make it."""
    names = ["deepseek_v3", "gpt_oss", "kimi_linear", "llama4_text", "zamba2"]
    run = survey_flops(*names, "--markdown")
    made = [cells(line) for line in run.stdout.splitlines()[2:] if line.startswith("|")]
    assert [row[0] for row in made] == names
    assert made == [documented()[name] for name in names]


def test_a_checkpoint_by_its_config(tmp_path):
    Qwen3Config(num_hidden_layers=8, hidden_size=4096, intermediate_size=16384).save_pretrained(tmp_path)
    run = survey_flops("--path", tmp_path)
    assert run.returncode == 0, run.stderr
    header, row, _, summary = run.stdout.splitlines()
    assert header.split() == ["architecture", "counted", "counter", "error", "attention", "verdict"]
    assert row.split()[3:] == ["0.00%", "useful", "counted"]
    assert summary.startswith("1 architectures: 1 counted, 0 WRONG, 0 refused, 0 not built (transformers ")


def never_run():
    model = tiny("llama")
    model.model.layers[0].mlp.spare = nn.Linear(16, 16)
    return model


def test_a_wrong_count_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["survey", "flops", "llama"])
    monkeypatch.setattr("posttrain.models.survey.tiny_models.tiny", lambda name: never_run())
    assert survey.main() == 1
    row = capsys.readouterr().out.splitlines()[1]
    assert "WRONG: the count differs" in row and "0.00%" not in row
