"""Every other fault of docs/reliability.md, and kills at random moments: minutes, so `make test-slow` runs them.

Each test asserts that its fault came about, and that nothing is lost.
"""

import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from faulty_runs import Job, assert_same, records, run, start, steps_saved

pytestmark = pytest.mark.slow
LONG = ["steps=12", "checkpoint.every=3", "evaluation.every=4", "checkpoint.keep_last=2"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Undisturbed runs of twelve steps, by their ranks."""
    made: dict[int, Path] = {}

    def on(ranks: int) -> Path:
        if ranks not in made:
            directory = tmp_path_factory.mktemp("whole") / str(ranks)
            job = run(directory, *LONG, f"launch.nproc={ranks}")
            assert job.process.returncode == 0, job.output
            made[ranks] = directory
        return made[ranks]

    return on


def resume(directory: Path, *overrides: str) -> Job:
    job = run(directory, *LONG, "resume=auto", *overrides)
    assert job.process.returncode == 0, job.output
    assert job.summary["status"] == "completed"
    return job


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [1, 2])
def test_kills_at_random_moments(whole, tmp_path, ranks):
    """Fifteen runs on one rank and fifteen on two, each killed up to three times: always bitwise."""
    draw, kills, expected = random.Random(ranks), 0, whole(ranks)
    for number in range(15):
        directory = tmp_path / str(number)
        for life in range(3):
            job = start(directory, *LONG, f"launch.nproc={ranks}", *["resume=auto"] * (life > 0))
            begun = directory / "summary.json"
            before = begun.stat().st_mtime if begun.exists() else 0
            job.wait_for(lambda b=begun, t=before: b.exists() and b.stat().st_mtime > t)
            time.sleep(draw.uniform(0, 2.5))
            kills += job.process.poll() is None
            job.kill()
            if job.summary["status"] == "completed":
                break
        resume(directory, f"launch.nproc={ranks}")
        assert_same(directory, expected)
        assert len(steps_saved(directory)) == 2 and not list(directory.glob("checkpoints/[pr]*"))
    assert kills > 20


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_preempted_at_random_moments(whole, tmp_path, name):
    """The command is asked, or one of its ranks alone."""
    draw, statuses, expected = random.Random(name), [], whole(2)
    for number in range(6):
        directory = tmp_path / str(number)
        job = start(directory, *LONG, "launch.nproc=2")
        job.wait_for((directory / "summary.json").exists)
        time.sleep(draw.uniform(0, 2))
        os.kill(draw.choice([job.process.pid, *job.ranks()]), getattr(signal, name))
        statuses.append(job.finish())
        said = job.summary["status"]
        assert (statuses[-1], said) in [(143, "preempted"), (0, "completed")], job.output
        resume(directory, "launch.nproc=2")
        assert_same(directory, expected)
    assert statuses.count(143) >= 4


def test_the_main_rank_closes_what_takes_longer_than_its_peers(tmp_path):
    """wandb takes seconds to finish, and the other rank is gone by then."""
    job = start(tmp_path / "run", *LONG, "launch.nproc=2", "logger=wandb", "logger.mode=offline")
    job.wait_for(lambda: job.steps_on_record() >= 2)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == 143 and job.summary["status"] == "preempted"
    assert job.summary["logger"]["available"] and job.summary["logger"]["id"], job.summary["logger"]


def test_requeue_ends_with_status_0(tmp_path):
    job = start(tmp_path / "run", *LONG, "launch.requeue=true")
    job.wait_for(lambda: job.steps_on_record() >= 2)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == 0 and job.summary["status"] == "preempted" and steps_saved(job.directory)


def test_a_rank_that_cannot_save_in_time_is_ended(tmp_path):
    """One of two ranks is stopped, so there is no point that both reach."""
    job = start(tmp_path / "run", *LONG, "launch.nproc=2", "launch.grace_s=3")
    job.wait_for(lambda: job.steps_on_record() >= 4)
    os.kill(max(job.ranks()), signal.SIGSTOP)
    began = time.monotonic()
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == 143 and 2 < time.monotonic() - began < 15
    assert job.summary["status"] == "preempted"
    assert "no checkpoint was written within launch.grace_s=3; its newest checkpoint is" in job.summary["error"]


@pytest.mark.parametrize("place", ["checkpoints/partial_*", "model.partial"])
def test_a_death_while_something_is_written(whole, tmp_path, place):
    """Stopped when the half-written directory is there, looked at, and killed. A run that was too fast is repeated."""
    for attempt in range(20):
        job = start(tmp_path / str(attempt), *LONG)
        job.wait_for(lambda job=job: list(job.directory.glob(place)) or (job.directory / "model").exists())
        os.killpg(job.process.pid, signal.SIGSTOP)
        half = list(job.directory.glob(place))
        whole_before = steps_saved(job.directory)
        job.kill()
        if half:
            break
    assert half and not (job.directory / "model").exists()
    assert whole_before == steps_saved(job.directory)
    resume(job.directory)
    assert not list(job.directory.glob(place))
    assert_same(job.directory, whole(1))


@pytest.mark.parametrize("victim", [0, 1])
def test_one_of_two_ranks_dies(whole, tmp_path, victim):
    job = start(tmp_path / "run", *LONG, "launch.nproc=2")
    job.wait_for(lambda: job.steps_on_record() >= 4)
    ranks = job.ranks()
    os.kill(ranks[victim], signal.SIGKILL)
    assert job.finish() == 1 and not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    said = f"rank {victim} was killed by SIGKILL, often because memory ran out in phase "
    assert said in job.output and "; what lowers it: " in job.output and said in job.summary["error"]
    resume(job.directory, "launch.nproc=2")
    assert_same(job.directory, whole(2))


def test_memory_runs_out(tmp_path):
    """From outside a rank is given no more memory than it has, and a step that needs more."""
    job = start(tmp_path / "run", *LONG, "steps=500", "prompts_per_step=32", "packing.tokens_per_row=100000")
    job.wait_for(lambda: job.steps_on_record() >= 2)
    (pid,) = job.ranks()
    size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.prlimit(pid, resource.RLIMIT_AS, (size, size))
    assert job.finish() in (1, -signal.SIGKILL)
    said = job.summary["error"]
    assert job.summary["status"] == "failed" and "memory" in said and " in phase " in said and "what lowers it" in said


def test_the_first_rank_stands_still(tmp_path):
    """The one that all others report to."""
    job = start(tmp_path / "run", *LONG, "launch.nproc=2", "launch.timeout_s=6", "steps=500")
    job.wait_for(lambda: job.steps_on_record() >= 2)
    began = time.monotonic()
    os.kill(min(job.ranks()), signal.SIGSTOP)
    assert job.finish() == 1 and time.monotonic() - began < 20
    assert "rank 0 stands still in phase " in job.output and "gloo" not in job.output


def damaged(kind: str, folder: Path) -> None:
    weights, states, manifest = (folder / n for n in ("rank_00000.safetensors", "rank_00000.json", "manifest.json"))
    content = bytearray(weights.read_bytes())
    match kind:
        case "weights flipped":
            content[-1000] ^= 4
            weights.write_bytes(content)
        case "header flipped":
            content[20] ^= 1
            weights.write_bytes(content)
        case "weights cut off":
            os.truncate(weights, len(content) // 2)
        case "weights missing":
            weights.unlink()
        case "generators flipped":
            states.write_text(states.read_text().replace("3", "5", 1))
        case "generators missing":
            states.unlink()
        case "generators garbled":
            states.write_bytes(b"\0" * 100)
        case "manifest flipped":
            manifest.write_text(manifest.read_text().replace('"step": 12', '"step": 11'))
        case "manifest missing":
            manifest.unlink()
        case "manifest empty":
            manifest.write_text("")
        case "another's weights":
            shutil.copy(folder.with_name("step_00000009") / weights.name, weights)
        case "a pipe":
            states.unlink()
            os.mkfifo(states)


KINDS = (
    "weights flipped", "header flipped", "weights cut off", "weights missing", "generators flipped",
    "generators missing", "generators garbled", "manifest flipped", "manifest empty",
    "manifest missing", "another's weights", "a pipe",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_checkpoint_is_never_trained_on(whole, tmp_path, kind):
    directory, newest = tmp_path / "run", "step_00000012"
    shutil.copytree(whole(1), directory)
    shutil.rmtree(directory / "model")
    damaged(kind, directory / "checkpoints" / newest)
    named = run(tmp_path / "named", *LONG, "steps=13", f"resume={directory / 'checkpoints' / newest}")
    assert named.process.returncode == 2 and f"{newest} is damaged: " in named.output, named.output
    assert len([line for line in named.output.splitlines() if "damaged" in line]) == 1
    resumed = resume(directory)
    assert f"{newest} is damaged and passed over: " in resumed.summary["resume_notes"][0]
    assert_same(directory, whole(1))


def test_all_checkpoints_damaged(whole, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(whole(1), directory)
    for folder in directory.glob("checkpoints/step_*"):
        damaged("weights cut off", folder)
    before = records(directory)
    job = run(directory, *LONG, "resume=auto")
    assert job.process.returncode == 2 and "every checkpoint" in job.output and records(directory) == before


class Canary:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_no_code_of_a_checkpoint_runs(whole, tmp_path):
    """Pickles under the names that other formats read, and in place of what is read."""
    directory, canary = tmp_path / "run", tmp_path / "canary"
    shutil.copytree(whole(1), directory)
    poison = pickle.dumps(Canary(canary))
    for folder in directory.glob("checkpoints/step_*"):
        for name in (".metadata", "random_states_0.pkl", "optimizer.bin", "pytorch_model.bin", "__0_0.distcp"):
            (folder / name).write_bytes(poison)
    shutil.rmtree(directory / "model")
    resume(directory, "steps=13")
    for name in ("rank_00000.safetensors", "rank_00000.json", "manifest.json"):
        (directory / "checkpoints" / "step_00000013" / name).write_bytes(poison)
        assert run(directory, *LONG, "resume=auto", "steps=14").process.returncode in (0, 2)
    assert not canary.exists()
    pickle.loads(poison)
    assert canary.exists()


def test_other_data_under_the_same_name_is_said(tmp_path):
    data = tmp_path / "data.jsonl"
    rows = [json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n)}) for n in range(40)]
    data.write_text("\n".join(rows))
    table = ["task=jsonl", f"task.path={data}", "task.heldout=8"]
    assert run(tmp_path / "run", *LONG, *table, "steps=3").process.returncode == 0
    data.write_text("\n".join(rows[:-1]))
    refused = run(tmp_path / "run", *LONG, *table, "resume=auto", "steps=4", "strict=true")
    assert refused.process.returncode == 2 and "the problems are not those that the run has read" in refused.output
    job = run(tmp_path / "run", *LONG, *table, "resume=auto", "steps=4")
    assert job.process.returncode == 0 and "32 problems" in job.summary["resume_notes"][0]


def test_a_disk_that_is_full_for_everybody(tmp_path):
    """Not even a status of a few hundred bytes finds room, but for the one that was kept for it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]).returncode:
        pytest.skip("mounts a small file system")
    try:
        job = start(disk / "run", *LONG, "steps=500", "checkpoint.every=0")
        job.wait_for(lambda: job.steps_on_record() >= 2)
        with (disk / "filler").open("wb", buffering=0) as filler:
            for size in (4096, 1):
                try:
                    while True:
                        filler.write(b"x" * size)
                except OSError:
                    pass
        assert job.finish() == 1 and "No space left" in job.output and "Traceback" not in job.output
        assert job.summary["status"] == "failed" and job.summary["steps"] >= 2
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_wandb_leaves_nothing_in_the_temporary_directory(tmp_path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    job = run(tmp_path / "run", *LONG, "steps=2", "logger=wandb", "logger.mode=offline", TMPDIR=str(temporary))
    assert job.process.returncode == 0 and list((job.directory / "wandb").glob("offline-run-*"))
    assert [path.name for path in temporary.iterdir() if "wandb" in path.name] == []


@pytest.mark.parametrize("ranks", [[2, 1], [2, 4], [4, 3]])
def test_another_number_of_ranks_goes_on(tmp_path, ranks):
    """The data order is continued exactly, and metrics but for the order of sums."""
    before, after = ranks
    job = run(tmp_path / "run", *LONG, "steps=3", f"launch.nproc={before}", "optim.schedule=constant")
    assert job.process.returncode == 0, job.output
    again = run(tmp_path / "again", *LONG, "steps=6", f"launch.nproc={before}", "optim.schedule=constant")
    resumed = run(tmp_path / "run", *LONG, "steps=6", f"launch.nproc={after}", "optim.schedule=constant", "resume=auto")
    assert resumed.process.returncode == 0, resumed.output
    assert again.process.returncode == 0, again.output
    trained = [[line for line in records(job.directory) if "reward" in line] for job in (resumed, again)]
    assert [line["step"] for line in trained[0]] == [1, 2, 3, 4, 5, 6]
    for one, other in zip(*trained, strict=True):
        assert (one["step"], one["num_tokens"]) == (other["step"], other["num_tokens"])
        assert one["reward"] == pytest.approx(other["reward"], abs=1e-6)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)


def test_a_run_whose_directory_is_deleted_says_so(tmp_path):
    job = start(tmp_path / "run", "steps=300")
    job.wait_for(lambda: job.steps_on_record() >= 2)
    # At once, where removing it file by file races with the run.
    job.directory.rename(tmp_path / "elsewhere")
    assert job.finish(60) == 1 and " was deleted or moved while the run was at work" in job.output


def test_a_rank_that_stands_still_is_named(tmp_path):
    job = start(tmp_path / "run", "launch.nproc=2", "steps=500", "launch.timeout_s=5")
    job.wait_for(lambda: job.steps_on_record() >= 2)
    os.kill(max(job.ranks()), signal.SIGSTOP)
    assert job.finish(60) == 1
    (said,) = [line for line in job.output.splitlines() if "stands still" in line]
    assert said.startswith("rank 1 stands still in phase ") and "its process has been stopped" in said
    assert job.summary["status"] == "failed" and "rank 1 stands still" in job.summary["error"]
