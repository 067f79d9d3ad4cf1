"""The notebooks, run from top to bottom on real runs, and what is kept of them in git."""

import json
from statistics import mean

import nbformat
import pytest
from conftest import ROOT, SMALL, command
from nbclient import NotebookClient

from posttrain.command.launch import close_run

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PICTURES = {
    "algorithms": {"algorithms", "held_out"},
    "mfu_curves": {"mfu_curves", "phases"},
    "sharding_sweep": {"sharding_sweep", "sharding_loss"},
}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sweep") / "sweep"
    jobs = ["-m", "fsdp=full_shard,no_shard", "launch.nproc=1", "steps=3", "packing.verify=false"]
    process = command("grpo", *SMALL, *jobs, f"hydra.sweep.dir={directory}")
    assert process.returncode == 0, process.stdout
    config = next(directory.glob("*no_shard*/config.yaml")).read_text()
    failed = directory / "fsdp-hybrid_shard"  # as the launcher leaves a job that fails before its first record
    failed.mkdir()
    (failed / "config.yaml").write_text(config.replace("no_shard", "hybrid_shard"))
    close_run(failed, "failed", "UserError: the mesh of hybrid_shard")
    return directory


def test_the_notebooks_are_there():
    assert {path.stem for path in NOTEBOOKS} == PICTURES.keys()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path, sweep, tmp_path, monkeypatch):
    pictures = tmp_path / "pictures"
    for name, value in {"RUNS": sweep, "PICTURES": pictures, "IPYTHONDIR": tmp_path / "ipython"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": path.parent}}
    ).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type in ("error", "stream")]  # nor warnings
    assert sum("image/png" in output.get("data", {}) for output in outputs) == len(PICTURES[path.stem])
    assert {picture.stem for picture in pictures.glob("*.png")} == PICTURES[path.stem]

    if path.stem == "algorithms":
        return
    (table,) = [text for output in outputs if "MFU %" in (text := output.get("data", {}).get("text/html", ""))]
    assert all(name in table for name in ("full_shard", "no_shard", "hybrid_shard", "the mesh of hybrid_shard"))
    assert "measured: float32 matmul" in table
    for metrics in sweep.glob("*/metrics.jsonl"):
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        measured = [record["perf/tokens_per_second"] for record in records if record["step"] > 1 and "loss" in record]
        assert len(measured) == 2 and f"{mean(measured):.6f}".rstrip("0") in table  # as pandas prints


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_kept_without_outputs_and_in_few_lines(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert all(len(cell.source.splitlines()) <= 6 for cell in code)
    assert notebook.metadata.kernelspec.name == "python3" and "version" not in notebook.metadata.language_info
