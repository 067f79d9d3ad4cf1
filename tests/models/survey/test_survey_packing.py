"""`python -m posttrain.models.survey packing`: it patches functions of its process, so each run has one of its own."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT
from transformers import Qwen3Config

from posttrain.models.survey import __main__ as survey


def survey_packing(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "posttrain.models.survey", "packing", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_named_architectures_one_of_them_refused():
    """A hybrid that leaks without us, attention that does not, and a state that nothing reaches."""
    run = survey_packing("qwen3_5", "mamba", "llama", "--json")
    assert run.returncode == 1
    assert "probe 3/3 llama" in run.stderr
    hybrid, state, attention = json.loads(run.stdout)["checks"]
    assert [c["architecture"] for c in (hybrid, state, attention)] == ["qwen3_5", "mamba", "llama"]
    assert hybrid["position_ids_only"] > 0.1 and hybrid["difference"] < 1e-4 and hybrid["verdict"] == "packs"
    assert hybrid["layers"] == {"Qwen3_5GatedDeltaNet": 1, "Qwen3_5Attention": 1}
    assert hybrid["kernels"]["gated_delta_rule"] == "reference (torch)"
    assert state["position_ids_only"] > 0.1 and state["difference"] is None and state["verdict"] == "refused"
    assert "MambaMixer" in state["reason"] and "padded" not in state["reason"]
    assert attention["position_ids_only"] < 1e-4 and attention["verdict"] == "packs" and attention["reason"] is None


def test_a_checkpoint_by_its_config_as_markdown(tmp_path):
    Qwen3Config(num_hidden_layers=8, hidden_size=4096, intermediate_size=16384).save_pretrained(tmp_path)
    run = survey_packing("--path", tmp_path, "--markdown")
    assert run.returncode == 0, run.stderr
    header, rule, row, _, summary = run.stdout.splitlines()
    assert header.startswith("| architecture | position_ids only |") and rule == "|---|---|---|---|---|"
    assert row.startswith(f"| {tmp_path} | ") and row.endswith(" | packs |") and row.count("|") == 6
    assert summary.startswith("1 architectures: 1 packs, 0 refused, 0 not built (transformers ")


def cells(line):
    return [cell.strip() for cell in line.strip("|\n").split("|")]


def test_rows_are_those_of_the_documentation():
    """A few rows of the table, made again: kernels and verdicts the same, figures but for rounding."""
    names = ["qwen3_5", "bart", "bert", "granitemoehybrid", "mamba", "gpt_oss", "zamba2+adapters"]
    run = survey_packing(*names, "--markdown")
    made = [cells(line) for line in run.stdout.splitlines()[2:] if line.startswith("|")]
    lines = (ROOT / "docs" / "tables" / "packing.md").read_text().splitlines()
    documented = {row[0]: row for row in map(cells, lines)}
    assert [row[0] for row in made] == names
    for name, leak, ours, kernels, verdict in made:
        _, leak_then, ours_then, kernels_then, verdict_then = documented[name]
        assert (kernels, verdict) == (kernels_then, verdict_then)
        assert float(leak) > 1e-2 and float(leak) == pytest.approx(float(leak_then), rel=0.1)
        assert bool(ours) == bool(ours_then) and (not ours or float(ours) < 1e-5)


@pytest.mark.parametrize("table", ["packing", "flops"])
@pytest.mark.parametrize(
    "arguments, said",
    [(["qwen35"], "'qwen35'. Type: qwen3_5"), (["--path", "./nowhere"], "--path ./nowhere is no directory")],
)
def test_a_name_that_does_not_exist(table, arguments, said, monkeypatch, capsys):
    """Refused before anything is patched, so this process may try it."""
    monkeypatch.setattr(sys, "argv", ["survey", table, *arguments])
    assert survey.main() == 2
    printed = capsys.readouterr()
    assert printed.out == "" and said in printed.err and printed.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["pakcing"]])
def test_a_table_that_does_not_exist(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["survey", *arguments])
    with pytest.raises(SystemExit) as exit_:
        survey.main()
    assert exit_.value.code == 2 and "packing|flops" in capsys.readouterr().err
