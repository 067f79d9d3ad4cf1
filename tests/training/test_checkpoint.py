"""A resumed run equals the uninterrupted one bitwise, on any start; what is no checkpoint is refused."""

import json
import shutil

import pytest
import torch
from conftest import command
from faulty_runs import SHORT, records
from jobs import run_jobs, values
from transformers import AutoModelForCausalLM

from posttrain.config import CheckpointConf
from posttrain.config.validation import typed
from posttrain.errors import UserError
from posttrain.models.tiny import tiny_config
from posttrain.training import checkpoint, manifest
from posttrain.training.manifest import Manifest
from posttrain.training.policy import prepare
from posttrain.training.saving import Saver
from posttrain.training.snapshot import generator_states

RUN = [*SHORT, "steps=4", "evaluation.every=0"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of four steps on two ranks, with checkpoints after two and four."""
    (run,) = run_jobs(tmp_path_factory.mktemp("whole") / "jobs", RUN, nproc=2)
    assert run.returncode == 0, run.output
    return run.directory


def test_resume_from_a_path_into_a_new_directory(whole, tmp_path):
    step = whole / "checkpoints" / "step_00000002"
    (run,) = run_jobs(tmp_path / "jobs", [*RUN, f"resume={step}"], nproc=2)
    assert run.returncode == 0, run.output
    assert records(run.directory) == records(whole)[2:]
    assert run.summary["resumed_from"] == str(step) and run.summary["resume_notes"] == []


def test_resume_auto_continues_in_the_same_directory(whole, tmp_path):
    """As after a kill in step 4: the newest checkpoint is of step 2, and step 3 is on record already."""
    copy = tmp_path / "run"
    shutil.copytree(whole, copy)
    shutil.rmtree(copy / "checkpoints" / "step_00000004")
    (copy / "checkpoints" / "step_00000004").mkdir()  # died while it renamed: incomplete, not taken
    process = command("grpo", *RUN, "checkpoint.export=false", "launch.nproc=2", "resume=auto", f"hydra.run.dir={copy}")
    assert process.returncode == 0, process.stdout
    assert records(copy) == records(whole)
    assert [path.name for path in checkpoint.complete(copy)] == ["step_00000002", "step_00000004"]


def test_other_ranks_and_strategies_go_on_and_other_models_are_refused(whole, tmp_path):
    more = [*RUN, f"resume={whole}", "steps=5"]
    (run,) = run_jobs(tmp_path / "one", more)
    assert run.returncode == 0 and "the checkpoint is of 2 ranks" in run.output, run.output
    assert [record["step"] for record in run.training] == [5]
    (other,) = run_jobs(tmp_path / "ddp", [*more, "fsdp=no_shard"], nproc=2)
    assert other.returncode == 0 and other.summary["sharding"] == "no_shard", other.output
    assert other.training[0]["reward"] == run.training[0]["reward"]
    (wrong,) = run_jobs(tmp_path / "wrong", [*more, "model=qwen3_dense"])
    assert wrong.returncode and "Resume with its model" in wrong.output, wrong.output
    (done,) = run_jobs(tmp_path / "done", [*more, "steps=3"])
    assert done.returncode and "is a checkpoint of step 4, and steps=3: raise steps" in done.output, done.output


def test_only_the_newest_are_kept_and_the_export_loads_and_evaluates(tmp_path):
    options = ["checkpoint.every=1", "checkpoint.keep_last=1", "checkpoint.export=true", "evaluation.every=1"]
    (run,) = run_jobs(tmp_path / "run", [*options, "evaluation.prompts=16"])
    assert run.returncode == 0, run.output
    directory = run.directory
    assert [path.name for path in checkpoint.complete(directory)] == ["step_00000002"]
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    kinds = [(line["step"], next(k for k in ("loss", "eval/reward", "time/checkpoint") if k in line)) for line in lines]
    assert kinds == [(step, kind) for step in (1, 2) for kind in ("loss", "eval/reward", "time/checkpoint")]
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


def save(policy, run_dir, step, **options):
    saver = Saver(run_dir, CheckpointConf(**{"keep_last": 0} | options), "eval/reward", 60)
    saver.save(policy.model, policy.optimizer, None, step, generator_states(), {}, {})
    saver.wait()


def load(policy, folder):
    return checkpoint.load(policy.model, policy.optimizer, folder)[0].step


def test_another_width_of_the_same_family_is_refused(prepared, tmp_path):
    save(prepared, tmp_path, 1)
    config = tiny_config("qwen3_dense")
    config.intermediate_size //= 2
    other, (found,) = AutoModelForCausalLM.from_config(config), checkpoint.complete(tmp_path)
    with pytest.raises(UserError, match=r"has parameters [0-9]+, this run [0-9]+. Resume with its model"):
        checkpoint.load(other, prepared.optimizer, found)


def test_torch_has_its_threads_again_after_a_load(prepared, tmp_path):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        save(prepared, tmp_path, 1)
        assert torch.get_num_threads() == 2
        assert load(prepared, *checkpoint.complete(tmp_path)) == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def checkpoints(run_dir, *steps):
    """What vouches for itself, of no ranks and no files."""
    for step in steps:
        folder = run_dir / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        nothing = dict(model="", parameters=0, world_size=0, evaluation={}, fingerprints={}, files={})
        manifest.write(folder, Manifest(step=step, **nothing))


def found(resume, run_dir):
    return checkpoint.find(resume, run_dir)[0]


def test_what_resume_means(tmp_path, one_rank):
    assert found(None, tmp_path) is None
    assert found("auto", tmp_path) is None
    checkpoints(tmp_path, 5, 100, 20)
    (tmp_path / "checkpoints" / "partial_00000200").mkdir()
    newest = tmp_path / "checkpoints" / "step_00000100"
    assert found("auto", tmp_path) == newest
    assert found(str(tmp_path), tmp_path / "other") == newest
    older = tmp_path / "checkpoints" / "step_00000005"
    assert found(str(older), tmp_path) == older
    for wrong in ("nowhere", tmp_path / "checkpoints" / "partial_00000200"):
        with pytest.raises(UserError, match="no checkpoint there. Give a run directory"):
            found(str(wrong), tmp_path)
    (newest / "manifest.json").unlink()
    before = newest.with_name("step_00000020")
    assert checkpoint.find("auto", tmp_path) == (
        before,
        ["step_00000100 is damaged and passed over: manifest.json is missing"],
    )
    with pytest.raises(UserError, match=f"step_00000100 is damaged: manifest.json is missing; type resume={before}"):
        found(str(tmp_path), tmp_path / "other")


def test_a_lost_manifest_is_no_new_beginning(tmp_path, one_rank):
    """Nor is a checkpoint of another version."""
    checkpoints(tmp_path, 1)
    (manifest_file,) = tmp_path.glob("checkpoints/*/manifest.json")
    manifest_file.rename(manifest_file.with_name("progress.json"))
    for resume in ("auto", str(tmp_path)):
        with pytest.raises(UserError, match="step_00000001 is damaged.*manifest.json is missing"):
            found(resume, tmp_path)
    with pytest.raises(UserError, match="of an earlier version, in pickles"):
        found("auto", tmp_path)
