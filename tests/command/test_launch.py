"""Starting, watching and ending ranks, through the command line of a recipe that does little."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

from posttrain.command import rank

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
RECIPE = """
import sys
from posttrain.command.cli import main

if __name__ == "__main__":
    main(__file__)

import json, os, signal, time, warnings
import torch, torch.distributed as dist
from posttrain.errors import UserError

def train(cfg, run_dir):
    warnings.warn("Triton is not supported on current platform, roll back to CPU.")
    rank, world = dist.get_rank(), dist.get_world_size()
    total = torch.ones(1)
    dist.all_reduce(total)
    facts = {
        "rank": rank, "world": world, "sum": total.item(), "seed": cfg.seed, "lr": cfg.optim.lr,
        "strategy": cfg.fsdp.strategy, "threads": torch.get_num_threads(),
        "omp": os.environ["OMP_NUM_THREADS"],
        "accelerate": [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))],
        "pid": os.getpid(), "module": __name__, "timeout": cfg.launch.timeout_s, "path": cfg.model.path,
    }
    (run_dir / f"facts{rank}.json").write_text(json.dumps(facts))
    print(f"hello from {rank} of {world}", flush=True)
    behaviour = cfg.logger.project
    if behaviour == "raise" and rank == 1:
        raise ValueError("broken on purpose\\nwith a second line")
    if behaviour == "mistake":
        raise UserError("model.path=/nowhere: no such directory")
    if behaviour == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "exits" and rank == 1:
        os._exit(7)
    if behaviour == "fail_seed_1" and cfg.seed == 1:
        raise RuntimeError("seed 1 fails")
    if behaviour == "hang" or behaviour in ("raise", "killed", "exits"):
        dist.barrier()  # the peers of a lost rank wait here
    if behaviour == "hang":
        time.sleep(120)
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("project") / "recipes"
    folder.mkdir()
    (folder.parent / "conf").symlink_to(ROOT / "conf")
    (folder / "grpo.py").write_text(RECIPE)
    return folder / "grpo.py"


def environment(**extra: str) -> dict[str, str]:
    taken = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if k not in taken and not k.startswith(("SLURM_", "HYDRA_"))}
    return env | {"PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | extra


def start(*command: object, cwd: Path, **extra: str) -> subprocess.Popen:
    """`command` in a process group of its own, like a terminal's foreground job."""
    return subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env=environment(**extra),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, out, err


def run(recipe: Path, *arguments: str, cwd: Path, **extra: str) -> tuple[int, str, str]:
    return finish(start(sys.executable, recipe, *arguments, cwd=cwd, **extra))


def run_dirs(cwd: Path) -> list[Path]:
    return sorted(path.parent for path in (cwd / "outputs").rglob("job.json"))


def facts(run_dir: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(run_dir.glob("facts*.json"))]


def summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_for(condition, seconds: float = 20.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)
    return value


def test_one_rank_and_its_run_directory(recipe, tmp_path):
    (tmp_path / "weights").mkdir()
    code, out, err = run(recipe, "launch.nproc=1", "model.path=weights", "launch.threads=3", cwd=tmp_path)
    assert (code, err) == (0, "")
    assert "hello from 0 of 1" in out
    (run_dir,) = run_dirs(tmp_path)
    assert run_dir.parent == tmp_path / "outputs" / "grpo"
    (seen,) = facts(run_dir)
    assert (seen["world"], seen["threads"], seen["omp"], seen["module"]) == (1, 3, "3", "recipe_grpo")
    assert seen["path"] == str(tmp_path / "weights")
    assert "lr: ${when_embedded:${model.path}," in (run_dir / "config.yaml").read_text()
    assert json.loads((run_dir / "job.json").read_text())["optim"]["lr"] == 1e-6
    assert sorted(path.name for path in run_dir.iterdir()) == [
        "config.yaml",
        "facts0.json",
        "job.json",
        "logs",
    ]


def test_two_ranks_from_any_directory(recipe, tmp_path):
    """A file of the current directory shadows nothing, and accelerate's environment changes nothing."""
    (tmp_path / "torch.py").write_text("raise SystemExit('shadowed')")
    code, out, err = run(recipe, "launch.nproc=2", cwd=tmp_path, ACCELERATE_USE_FSDP="true", FSDP_VERSION="1")
    assert (code, err) == (0, "")
    assert "hello from 0 of 2" in out and "hello from 1" not in out
    (run_dir,) = run_dirs(tmp_path)
    assert "hello from 1 of 2" in (run_dir / "logs" / "rank1.log").read_text()
    assert [(f["rank"], f["sum"], f["accelerate"]) for f in facts(run_dir)] == [(0, 2.0, []), (1, 2.0, [])]


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "srun"])
def test_external_launchers(recipe, tmp_path, launcher):
    arguments = ["seed=5", "launch.timeout_s=77", "fsdp=no_shard"]
    if launcher == "torchrun":
        results = [finish(start(*TORCHRUN, recipe, *arguments, cwd=tmp_path))]
    elif launcher == "accelerate":
        command = [Path(sys.executable).with_name("accelerate"), "launch", "--cpu", "--num_processes", "1"]
        results = [finish(start(*command, recipe, *arguments, cwd=tmp_path))]
    else:
        results = srun(recipe, *arguments, cwd=tmp_path)
    assert [code for code, _, _ in results] == [0] * len(results), results
    (run_dir,) = run_dirs(tmp_path)
    world = 1 if launcher == "accelerate" else 2
    assert [f["sum"] for f in facts(run_dir)] == [world] * world
    assert {(f["seed"], f["timeout"], f["strategy"]) for f in facts(run_dir)} == {(5, 77.0, "no_shard")}
    assert not any(f["accelerate"] for f in facts(run_dir))
    assert sum(out.count("hello from") for _, out, _ in results) == 1


def srun(recipe: Path, *arguments: str, cwd: Path) -> list[tuple[int, str, str]]:
    """Two tasks as srun starts them."""
    slurm = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_JOB_ID": str(os.getpid()),
    }
    tasks = [start(sys.executable, recipe, *arguments, cwd=cwd, SLURM_PROCID=n, SLURM_LOCALID=n, **slurm) for n in "01"]
    return [finish(task) for task in tasks]


def test_jobs_of_slurm_on_one_node_meet_at_ports_of_their_own(monkeypatch):
    slurm = {
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "123456",
        "SLURM_STEP_NODELIST": "node[07-08]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }  # fmt: skip
    monkeypatch.setattr(os, "environ", dict(slurm))
    assert rank.started_elsewhere()
    made = {name: os.environ[name] for name in os.environ if name not in slurm}
    assert made == {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "node07",
        "MASTER_PORT": str(20000 + 123456 % 20000),
    }  # fmt: skip


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["packing=thdd"], "packing=thdd: no option; did you mean thd?"),
        (["--help"], ""),
    ],
)
def test_rank_0_speaks_for_all_tasks(recipe, tmp_path, arguments, message):
    (code, out, err), (peer_code, peer_out, peer_err) = srun(recipe, *arguments, cwd=tmp_path)
    assert code == peer_code == (2 if message else 0)
    assert (peer_out, peer_err) == ("", "")
    assert err.startswith(message) and ("group=option" in out) == (not message)
    assert not run_dirs(tmp_path)


def test_torchrun_failure_is_said_once(recipe, tmp_path):
    code, _, err = finish(start(*TORCHRUN, recipe, "logger.project=raise", cwd=tmp_path))
    assert code != 0
    assert err.count("rank 1: ValueError: broken on purpose (see ") == 1 and "Connection reset" not in err
    (run_dir,) = run_dirs(tmp_path)
    assert summary(run_dir)["status"] == "failed"
    assert "broken on purpose" in summary(run_dir)["error"]


def test_torchrun_stopped(recipe, tmp_path):
    process = start(*TORCHRUN, recipe, "logger.project=hang", cwd=tmp_path)
    ranks = wait_for(lambda: len(found := [f for d in run_dirs(tmp_path) for f in facts(d)]) == 2 and found)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] != 0
    assert not any(alive(rank["pid"]) for rank in ranks)
    assert summary(run_dirs(tmp_path)[0])["status"] == "preempted"


@pytest.mark.parametrize(
    "behaviour, status, message",
    [
        ("raise", 1, "rank 1: ValueError: broken on purpose (see "),
        ("killed", 1, "rank 1 was killed by SIGKILL, often because memory ran out in the start-up; what lowers it: "),
        ("exits", 1, "rank 1 ended with exit status 7; its output: "),
        ("mistake", 2, "model.path=/nowhere: no such directory"),
    ],
)
def test_a_lost_rank_ends_all(recipe, tmp_path, behaviour, status, message):
    began = time.monotonic()
    code, _, err = run(recipe, "launch.nproc=2", f"logger.project={behaviour}", cwd=tmp_path)
    assert (code, err.startswith(message)) == (status, True), err
    assert len(err.splitlines()) == 1, err
    (run_dir,) = run_dirs(tmp_path)
    assert not any(alive(f["pid"]) for f in facts(run_dir))
    assert (summary(run_dir)["status"], summary(run_dir)["error"]) == ("failed", err.strip())
    if behaviour == "raise":
        assert "Traceback" in (run_dir / "logs" / "rank1.log").read_text()
    assert time.monotonic() - began < 30


def test_debug_shows_the_traceback(recipe, tmp_path):
    arguments = ("launch.nproc=1", "seed=1", "logger.project=fail_seed_1", "debug=true")
    code, _, err = run(recipe, *arguments, cwd=tmp_path)
    assert code == 1
    assert "Traceback" in err and "RuntimeError: seed 1 fails" in err


@pytest.mark.parametrize("target", ["terminal", "parent", "quit", "term", "kill"])
def test_stopping_leaves_no_orphans(recipe, tmp_path, target):
    process = start(sys.executable, recipe, "launch.nproc=2", "logger.project=hang", cwd=tmp_path)
    ranks = wait_for(lambda: len(found := [f for d in run_dirs(tmp_path) for f in facts(d)]) == 2 and found)
    began = time.monotonic()
    if target == "terminal":
        os.killpg(process.pid, signal.SIGINT)
    else:
        names = {"parent": signal.SIGINT, "quit": signal.SIGQUIT, "term": signal.SIGTERM, "kill": signal.SIGKILL}
        process.send_signal(names[target])
    code, _, err = finish(process)
    assert code == {"terminal": 130, "parent": 130, "quit": 131, "term": 143, "kill": -signal.SIGKILL}[target]
    wait_for(lambda: not any(alive(rank["pid"]) for rank in ranks), 2)
    assert time.monotonic() - began < 4
    if target != "kill":
        status = "preempted" if target == "term" else "interrupted"
        assert err.startswith(status) and len(err.splitlines()) == 1
        assert summary(run_dirs(tmp_path)[0])["status"] == status


def test_sweep_goes_on_after_a_failure(recipe, tmp_path):
    code, out, err = run(
        recipe,
        "-m",
        "launch.nproc=1",
        "seed=1,2",
        "logger.project=fail_seed_1",
        "model.path=a/b",
        cwd=tmp_path,
    )
    assert code == 1
    assert err.count("rank 0: RuntimeError: seed 1 fails") == 1
    first, second = run_dirs(tmp_path)
    assert first.parent == second.parent and first.parent.parent == tmp_path / "outputs" / "grpo"
    assert second.name == "launch.nproc-1,logger.project-fail_seed_1,model.path-a-b,seed-2"
    assert [f["seed"] for f in facts(second)] == [2]
    assert facts(first)[0]["pid"] != facts(second)[0]["pid"]
    assert sorted(path.name for path in first.parent.iterdir()) == [first.name, second.name, "multirun.yaml"]


def test_directory_of_another_run(recipe, tmp_path):
    here = "hydra.run.dir=here"
    running = start(sys.executable, recipe, "launch.nproc=1", here, "logger.project=hang", cwd=tmp_path)
    wait_for(lambda: (tmp_path / "here" / "facts0.json").exists())
    busy = run(recipe, "launch.nproc=1", here, "resume=auto", cwd=tmp_path)
    running.send_signal(signal.SIGINT)
    assert finish(running)[0] == 130
    refused = run(recipe, "launch.nproc=1", here, cwd=tmp_path)
    resumed = run(recipe, "launch.nproc=1", here, "resume=auto", "seed=9", cwd=tmp_path)
    assert busy[0] == 2 and "another run is at work in it" in busy[2]
    assert refused[0] == 2 and "holds a run already" in refused[2] and "resume=auto" in refused[2]
    assert resumed[0] == 0 and facts(tmp_path / "here")[0]["seed"] == 9


def test_the_directory_of_a_run_that_failed_before_its_first_record_is_free(recipe, tmp_path):
    there = tmp_path / "here"
    failed = run(recipe, "launch.nproc=1", "hydra.run.dir=here", "logger.project=mistake", cwd=tmp_path)
    assert failed[0] == 2 and json.loads((there / "summary.json").read_text())["status"] == "failed"
    again = run(recipe, "launch.nproc=1", "hydra.run.dir=here", "seed=9", cwd=tmp_path)
    assert again[0] == 0 and facts(there)[0]["seed"] == 9, again
    (there / "metrics.jsonl").write_text('{"step": 1}\n')
    taken = run(recipe, "launch.nproc=1", "hydra.run.dir=here", cwd=tmp_path)
    assert taken[0] == 2 and "holds a run already" in taken[2]


def test_runs_of_the_same_second(recipe, tmp_path):
    parents = [start(sys.executable, recipe, "launch.nproc=1", f"seed={n}", cwd=tmp_path) for n in range(2)]
    assert [finish(parent)[0] for parent in parents] == [0, 0]
    assert sorted(facts(run_dir)[0]["seed"] for run_dir in run_dirs(tmp_path)) == [0, 1]


def test_unwritable_and_full(recipe, tmp_path):
    code, _, err = run(recipe, "hydra.run.dir=/proc/nowhere", cwd=tmp_path)
    assert (code, len(err.splitlines())) == (1, 1) and "/proc/nowhere" in err


@pytest.mark.skipif(shutil.which("script") is None, reason="needs util-linux's script")
def test_rank_0_keeps_the_terminal(recipe, tmp_path):
    """tqdm draws a bar only where stderr is a terminal."""
    source = recipe.read_text().replace('print(f"hello', 'print("tty", sys.stderr.isatty()); print(f"hello')
    (recipe.parent / "sft.py").write_text(source)
    command = f"{sys.executable} {recipe.parent / 'sft.py'} launch.nproc=1"
    code, out, _ = finish(start("script", "-qec", command, "/dev/null", cwd=tmp_path))
    assert code == 0 and "tty True" in out
