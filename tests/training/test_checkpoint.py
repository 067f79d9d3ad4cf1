"""A resumed run equals the uninterrupted one bitwise, on any start; what is no checkpoint is refused."""

import json
import shutil

import pytest
import torch
from conftest import SMALL, command
from jobs import run_jobs, values
from transformers import AutoModelForCausalLM

from posttrain.config.validation import typed
from posttrain.errors import UserError
from posttrain.models.tiny import tiny_config
from posttrain.training import checkpoint
from posttrain.training.policy import prepare

RUN = [*SMALL, "steps=4", "checkpoint.every=2", "optim.schedule=linear", "optim.warmup_steps=3"]


def records(directory):
    """Of training, without what a clock or the memory says."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if not name.startswith(("time/", "perf/"))}
        for line in lines
        if "loss" in line
    ]


@pytest.fixture(scope="module", params=[1, 2])
def whole(request, tmp_path_factory):
    """An uninterrupted run of four steps with checkpoints after two and four."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    process = command("grpo", *RUN, f"launch.nproc={request.param}", f"hydra.run.dir={directory}")
    assert process.returncode == 0, process.stdout
    return directory, f"launch.nproc={request.param}"


@pytest.mark.parametrize("whole", [2], indirect=True)
def test_resume_from_a_path_into_a_new_directory(whole, tmp_path):
    directory, _ = whole
    step = directory / "checkpoints" / "step_00000002"
    (run,) = run_jobs(tmp_path / "jobs", [*RUN, f"resume={step}"], nproc=2)
    assert run.returncode == 0, run.output
    assert records(run.directory) == records(directory)[2:]
    assert run.summary["resumed_from"] == str(step)


def test_resume_auto_continues_in_the_same_directory(whole, tmp_path):
    """As after a kill in step 4: the newest checkpoint is of step 2, and step 3 is on record already."""
    directory, nproc = whole
    copy = tmp_path / "run"
    shutil.copytree(directory, copy)
    shutil.rmtree(copy / "checkpoints" / "step_00000004")
    (copy / "checkpoints" / "step_00000004").mkdir()  # died while it renamed: incomplete, not taken
    process = command("grpo", *RUN, nproc, "resume=auto", f"hydra.run.dir={copy}")
    assert process.returncode == 0, process.stdout
    assert records(copy) == records(directory)
    assert [path.name for path in checkpoint.complete(copy)] == ["step_00000002", "step_00000004"]


def test_other_ranks_go_on_and_other_formats_are_refused(whole, tmp_path):
    directory, nproc = whole
    other = "launch.nproc=1" if nproc == "launch.nproc=2" else "launch.nproc=2"
    process = command(
        "grpo", *RUN, other, "seed=0", f"resume={directory}", "steps=5", f"hydra.run.dir={tmp_path / 'run'}"
    )
    assert process.returncode == 0 and "resumed with steps=5 instead of 4" in process.stdout, process.stdout
    (record,) = records(tmp_path / "run")
    assert record["step"] == 5
    if other == "launch.nproc=1":
        return
    for wrong, advice in (("fsdp=no_shard", "fsdp=full_shard"), ("model=qwen3_dense", "its model")):
        (run,) = run_jobs(tmp_path / wrong[:4], [*RUN, wrong, f"resume={directory}", "steps=5"])
        assert run.returncode and f"Resume with {advice}." in run.output, run.output


@pytest.mark.parametrize("whole", [1], indirect=True)
def test_nothing_left_to_do(whole, tmp_path):
    directory, nproc = whole
    before = (directory / "summary.json").read_text(), (directory / "metrics.jsonl").read_text()
    process = command("grpo", *RUN, nproc, "resume=auto", f"hydra.run.dir={directory}")
    assert process.returncode == 0 and "nothing left to do" in process.stdout, process.stdout
    assert before == ((directory / "summary.json").read_text(), (directory / "metrics.jsonl").read_text())
    (run,) = run_jobs(tmp_path / "jobs", [*RUN, f"resume={directory}", "steps=3"])
    assert run.returncode and "raise steps" in run.output, run.output


def test_only_the_newest_are_kept_and_the_export_loads_and_evaluates(tmp_path):
    options = ["checkpoint.every=1", "checkpoint.keep=1", "checkpoint.export=true", "evaluation.every=1"]
    (run,) = run_jobs(tmp_path / "run", [*options, "evaluation.prompts=16"])
    assert run.returncode == 0, run.output
    directory = run.directory
    assert [path.name for path in checkpoint.complete(directory)] == ["step_00000002"]
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    kinds = [(line["step"], next(k for k in ("loss", "eval/reward", "time/checkpoint") if k in line)) for line in lines]
    each = ("loss", "eval/reward", "time/checkpoint")
    assert kinds == [(1, kind) for kind in each] + [(2, "loss"), (2, "time/checkpoint"), (2, "eval/reward")]
    trained = json.loads((directory / "summary.json").read_text())["evaluation"]
    assert json.loads((directory / "model" / "config.json").read_text())["dtype"] == "bfloat16"  # as the weights came
    exported = [f"model.path={directory}/model", "model.dtype=bf16", "evaluation.prompts=16"]
    (evaluated,) = run_jobs(tmp_path / "evaluation", exported, recipe="evaluate")
    assert evaluated.returncode == 0, evaluated.output
    found = evaluated.summary["evaluation"]
    assert found["eval/rewards/correct"] == pytest.approx(trained["eval/rewards/correct"], abs=0.13)  # bf16: two of 16


@pytest.fixture
def prepared(one_rank):
    """A policy on this process alone."""
    return prepare(typed("grpo", values("grpo", ["model=qwen3_dense", "packing.verify=false"])))


def save(policy, run_dir, step):
    checkpoint.save(policy.accelerator, policy.model, run_dir, step, keep=0)


def test_a_save_that_fails_leaves_no_checkpoint(prepared, tmp_path, monkeypatch):
    """Nor does it harm the one before; the next save of the same step is whole."""
    real = prepared.accelerator.save_state
    save(prepared, tmp_path, 1)

    def full_disk(folder):
        real(folder)
        raise OSError("No space left on device")

    monkeypatch.setattr(prepared.accelerator, "save_state", full_disk)
    for step in (2, 1):
        with pytest.raises(OSError, match="No space left"):
            save(prepared, tmp_path, step)
        left = [path.name for path in checkpoint.complete(tmp_path)]
        assert left == ["step_00000001"][: step - 1]  # a step that is written again is gone before
    assert checkpoint.find("auto", tmp_path) is None
    monkeypatch.undo()
    save(prepared, tmp_path, 2)
    assert checkpoint.find("auto", tmp_path).name == "step_00000002"
    assert checkpoint.load(prepared.accelerator, prepared.model, checkpoint.find("auto", tmp_path)) == 2


def test_another_width_of_the_same_family_is_refused(prepared, tmp_path):
    save(prepared, tmp_path, 1)
    config = tiny_config("qwen3_dense")
    config.intermediate_size //= 2
    wrapped, other = prepared.accelerator, AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match=r"has parameters [0-9]+, this run [0-9]+. Resume with its model"):
        checkpoint.load(wrapped, other, checkpoint.find(str(tmp_path), tmp_path))


def test_torch_has_its_threads_again_after_a_save_and_a_load(prepared, tmp_path, monkeypatch):
    real, inside, before = prepared.accelerator.save_state, [], torch.get_num_threads()

    def noted(folder):
        inside.append(torch.get_num_threads())
        return real(folder)

    monkeypatch.setattr(prepared.accelerator, "save_state", noted)
    try:
        torch.set_num_threads(2)
        save(prepared, tmp_path, 1)
        assert (inside, torch.get_num_threads()) == ([1], 2)
        checkpoint.load(prepared.accelerator, prepared.model, checkpoint.find("auto", tmp_path))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def checkpoints(run_dir, *steps):
    for step in steps:
        folder = run_dir / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        (folder / checkpoint.PROGRESS).write_text(json.dumps({"step": step}))


def test_what_resume_means(tmp_path):
    assert checkpoint.find(None, tmp_path) is None
    assert checkpoint.find("auto", tmp_path) is None
    checkpoints(tmp_path, 5, 100, 20)
    (tmp_path / "checkpoints" / "partial_00000200").mkdir()
    newest = tmp_path / "checkpoints" / "step_00000100"
    assert checkpoint.find("auto", tmp_path) == newest
    assert checkpoint.find(str(tmp_path), tmp_path / "other") == newest
    older = tmp_path / "checkpoints" / "step_00000005"
    assert checkpoint.find(str(older), tmp_path) == older
    for wrong in ("nowhere", tmp_path / "checkpoints" / "partial_00000200"):
        with pytest.raises(UserError, match="no checkpoint there. Give a run directory"):
            checkpoint.find(str(wrong), tmp_path)
