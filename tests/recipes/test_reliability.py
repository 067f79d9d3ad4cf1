"""What is most likely to happen to a run, from outside; test_faults.py has the rest. Nothing is lost, bitwise."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from faulty_runs import assert_same, records, run, start, steps_saved


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Nothing happens to it."""
    job = run(tmp_path_factory.mktemp("whole") / "run")
    assert job.process.returncode == 0, job.output
    assert steps_saved(job.directory) == [4, 6] and job.summary["status"] == "completed"
    return job.directory


def resume(directory, *overrides):
    job = run(directory, "resume=auto", *overrides)
    assert job.process.returncode == 0, job.output
    return job


def everything(directory: Path) -> dict[str, bytes]:
    kept = {path for path in directory.rglob("*") if path.is_file() and path.parent.name != "logs"}
    return {str(path.relative_to(directory)): path.read_bytes() for path in kept}


def test_all_processes_die_in_a_step(whole, tmp_path):
    job = start(tmp_path / "run")
    job.wait_for(lambda: job.steps_on_record() >= 3)
    job.kill()
    assert job.summary["status"] == "running" and not (job.directory / "model").exists()
    resumed = resume(job.directory)
    assert resumed.summary["status"] == "completed" and resumed.summary["resumed_from"]
    assert_same(job.directory, whole)


def test_preempted_on_two_ranks(tmp_path):
    """A scheduler asks for the room; the checkpoint is of all ranks, and of the last step that was done.

    That a run goes on from one bit for bit is in test_faults.py, and for deaths above.
    """
    job = start(tmp_path / "run", "launch.nproc=2", "checkpoint.every=100")
    job.wait_for(lambda: job.steps_on_record() >= 3)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == 143 and "preempted; its newest checkpoint is step_0000000" in job.output
    assert job.summary["status"] == "preempted" and 3 <= job.summary["steps"] < 6
    assert steps_saved(job.directory) == [job.summary["steps"]]


def test_the_end_after_the_last_step_is_made_up_for(whole, tmp_path):
    """A death in the export: no step is left, and the evaluation, the model and the status are missing."""
    directory = tmp_path / "run"
    shutil.copytree(whole, directory)
    shutil.move(directory / "model", directory / "model.partial")
    (directory / "metrics.jsonl").write_text(
        "".join(line + "\n" for line in (directory / "metrics.jsonl").read_text().splitlines()[:-1])
    )
    (directory / "summary.json").write_text('{"status": "running"}')
    resumed = resume(directory)
    assert resumed.summary["status"] == "completed" and resumed.summary["steps"] == 6
    assert "step 1/6" not in resumed.output and not (directory / "model.partial").exists()
    assert_same(directory, whole)


def test_a_resume_with_nothing_to_do_or_that_is_refused_changes_nothing(whole, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(whole, directory)
    before = everything(directory)
    idle = resume(directory, "optim.lr=5e-4")
    assert "nothing left to do: step 6 of steps=6 is done" in idle.output and everything(directory) == before
    refused = run(directory, "resume=auto", "model=qwen3_dense", "steps=8")
    assert refused.process.returncode == 2 and "Resume with its model" in refused.output
    assert everything(directory) == before
    longer = resume(directory, "optim.lr=5e-4", "steps=7")
    assert json.loads((directory / "job.json").read_text())["optim"]["lr"] == 5e-4
    assert longer.summary["steps"] == 7 and "optim.lr=0.0005 instead of 0.001" in longer.output


def test_a_completed_run_without_a_checkpoint_is_not_begun_again(whole, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(whole, directory)
    shutil.rmtree(directory / "checkpoints")
    before = everything(directory)
    refused = run(directory, "resume=auto")
    assert refused.process.returncode == 2 and "no checkpoint to go on from: choose another" in refused.output
    assert everything(directory) == before


def flip(path: Path, place: int) -> None:
    """Four bits of a file, as a bad disk or cable does."""
    content = bytearray(path.read_bytes())
    content[place] ^= 0b1111
    path.write_bytes(content)


def test_a_flipped_bit_is_named_and_the_checkpoint_before_is_used(whole, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(whole, directory)
    weights = directory / "checkpoints" / "step_00000006" / "rank_00000.safetensors"
    flip(weights, weights.stat().st_size // 2)
    explicit = run(tmp_path / "other", f"resume={weights.parent}", "steps=8")
    assert explicit.process.returncode == 2, explicit.output
    assert "step_00000006 is damaged: rank_00000.safetensors is damaged: its SHA-256" in explicit.output
    assert f"type resume={weights.parent.with_name('step_00000004')}" in explicit.output
    shutil.rmtree(directory / "model")
    resumed = resume(directory)
    assert "step_00000006 is damaged and passed over: rank_00000.safetensors" in resumed.output
    assert resumed.summary["resume_notes"] and resumed.summary["resumed_from"].endswith("step_00000004")
    assert_same(directory, whole)


def test_a_full_disk_while_a_checkpoint_is_written(tmp_path):
    """No file may be larger than 2 MB, and the share of a rank is 5 MB: the status still finds room."""
    job = run(tmp_path / "run", shell='ulimit -f 2000; exec "$@"')
    assert job.process.returncode == 1, job.output
    assert "File too large" in job.output and "Traceback" not in job.output
    assert job.summary["status"] == "failed" and "File too large" in job.summary["error"]
    assert steps_saved(job.directory) == [] and os.listdir(job.directory / "checkpoints") == []
    assert not (job.directory / "logs" / "reserve").exists()


def test_a_console_that_takes_no_more(whole, tmp_path):
    """A pipe that is closed after its first line, and a full disk."""
    job = run(tmp_path / "run", shell='set -o pipefail; "$@" 2> /dev/full | head -1')
    assert job.process.returncode == 0 and job.output.count("\n") == 1, job.output
    assert job.summary["status"] == "completed"
    assert_same(job.directory, whole)


def test_what_comes_from_the_environment_is_in_no_file(tmp_path):
    secret = "sesame-4711"
    overrides = ["task.system_prompt='${oc.env:PASSPHRASE}'", "logger.project='${task.system_prompt}'", "steps=1"]
    job = run(tmp_path / "run", *overrides, PASSPHRASE=secret)
    assert job.process.returncode == 0, job.output
    held = [path for path in job.directory.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert held == [] and records(job.directory)
    assert "${oc.env:PASSPHRASE}" in (job.directory / "job.json").read_text()
