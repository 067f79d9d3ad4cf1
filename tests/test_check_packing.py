"""recipes/check_packing.py as a user types it: it patches functions of its process, so each run has one."""

import json
import runpy
import subprocess
import sys

import pytest
from conftest import ROOT
from transformers import Qwen3Config

RECIPE = ROOT / "recipes" / "check_packing.py"


def check_packing(*arguments):
    return subprocess.run(
        [sys.executable, str(RECIPE), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_named_architectures_one_of_them_refused():
    """A hybrid that leaks without us, attention that does not, and a state that nothing reaches."""
    run = check_packing("qwen3_5", "mamba", "llama", "--json")
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
    run = check_packing("--path", tmp_path, "--markdown")
    assert run.returncode == 0, run.stderr
    header, rule, row, _, summary = run.stdout.splitlines()
    assert header.startswith("| architecture | position_ids only |") and rule == "|---|---|---|---|---|"
    assert row.startswith(f"| {tmp_path} | ") and row.endswith(" | packs |") and row.count("|") == 6
    assert summary.startswith("1 architectures: 1 packs, 0 refused, 0 not built (transformers ")


@pytest.mark.parametrize(
    "arguments, said",
    [(["qwen35"], "'qwen35'. Type: qwen3_5"), (["--path", "./nowhere"], "--path ./nowhere is no directory")],
)
def test_a_name_that_does_not_exist(arguments, said, monkeypatch, capsys):
    """Refused before anything is patched, so this process may try it."""
    monkeypatch.setattr(sys, "argv", ["check_packing.py", *arguments])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(RECIPE), run_name="__main__")
    printed = capsys.readouterr()
    assert exit_.value.code == 2 and printed.out == ""
    assert said in printed.err and printed.err.count("\n") == 1
