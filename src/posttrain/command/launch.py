"""Starts the ranks of one job on this machine, watches them and reports how they ended. Imports no torch.

`python recipes/grpo.py` has read the command line and written the run directory's job.json; every rank is a
process `python -m posttrain.command.rank <recipe file> <run directory>`.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from posttrain import preemption
from posttrain.command.failures import why
from posttrain.config import JobConf, TrainingConf
from posttrain.preemption import EXIT_STATUS

GRACE_S = 1.0  # a rank's peers have this long to end by themselves
STOP_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Interrupted(BaseException):
    def __init__(self, signum: int) -> None:
        self.signum = signum


def visible_gpus() -> int:
    """CUDA devices that torch would see: the driver knows CUDA_VISIBLE_DEVICES and MIG."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    return count.value if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


def start_ranks(recipe: Path, run_dir: Path, cfg: JobConf, nproc: int) -> int:
    """Run the job in `run_dir` on `nproc` ranks here; the exit status, after saying why it is not 0."""
    logs = run_dir / "logs"
    logs.mkdir(exist_ok=True)
    ranks: list[subprocess.Popen] = []
    with _signals() as asked:
        try:
            _spawn(ranks, recipe, run_dir, cfg, nproc)
            codes = _watch(ranks, asked, cfg.launch.grace_s)
        except Interrupted as stop:
            _end(ranks)
            close_run(run_dir, "interrupted", signal.Signals(stop.signum).name)
            print(f"interrupted; what is done is in {run_dir}", file=sys.stderr)
            return 128 + stop.signum
        finally:
            _end(ranks)
    if not any(codes):
        return verdict(run_dir)
    if asked or EXIT_STATUS in codes:
        return _preempted(run_dir, cfg, codes)
    status, message = why(run_dir, codes, cfg)
    print(message, file=sys.stderr)
    close_run(run_dir, "failed", message)
    return status


def _watch(ranks: list[subprocess.Popen], asked: list[int], grace_s: float) -> list[int | None]:
    """Until every rank has ended, or one has failed: how each ended, None where it has not.

    `asked` fills when a scheduler wants the room: the ranks then write a checkpoint, and have `grace_s` for it.
    """
    deadline = math.inf
    codes = [rank.poll() for rank in ranks]
    # The main rank ends last: it closes the run's files.
    while None in codes and {*codes} <= {None, 0, EXIT_STATUS} and time.monotonic() < deadline:
        if asked and deadline == math.inf:
            # A rank gives up by itself; who cannot even do that is ended a moment later.
            deadline = time.monotonic() + grace_s + 2 * GRACE_S
            for rank in ranks:
                rank.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        codes = [rank.poll() for rank in ranks]
    # The peers of a failed rank get a moment: their errors may say more.
    _wait(ranks, GRACE_S)
    return [rank.poll() for rank in ranks]


def _preempted(run_dir: Path, cfg: JobConf, codes: list[int | None]) -> int:
    """The exit status of a run that was asked to make room, and a line that says how far it came."""
    from posttrain.tracking.files import read_summary

    status = read_summary(run_dir).get("status")
    if status == "completed":
        return 0
    saved = max(run_dir.glob("checkpoints/step_*/manifest.json"), default=None)
    where = f"its newest checkpoint is {saved.parent.name}" if saved else "it has no checkpoint yet"
    if status != "preempted" or set(codes) != {EXIT_STATUS}:
        late = f"no checkpoint was written within launch.grace_s={cfg.launch.grace_s:g}"
        close_run(run_dir, "preempted", f"the run was asked to make room, and {late}; {where}")
    goes_on = f": hydra.run.dir={run_dir} resume=auto goes on" * isinstance(cfg, TrainingConf)
    print(f"preempted; {where}{goes_on}", file=sys.stderr)
    return 0 if cfg.launch.requeue else EXIT_STATUS


def _spawn(ranks: list[subprocess.Popen], recipe: Path, run_dir: Path, cfg: JobConf, nproc: int) -> None:
    """Append one process a rank. The port is never free for others to take: rank 0 inherits its socket."""
    parent = os.getpid()
    libc = ctypes.CDLL(None)

    def before_exec() -> None:
        # Ctrl-C and Ctrl-\\ reach every process of the terminal, and the parent decides.
        for signum in STOP_SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
        if sys.platform == "linux":
            # PR_SET_PDEATHSIG: a killed parent leaves no orphan.
            libc.prctl(1, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

    scrubbed = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_", "HYDRA_"))}
    source = str(Path(__file__).parents[2])
    with socket.create_server(("127.0.0.1", 0), backlog=nproc + 8) as listener:
        shared = {
            "WORLD_SIZE": nproc,
            "LOCAL_WORLD_SIZE": nproc,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": listener.getsockname()[1],
            "OMP_NUM_THREADS": threads(cfg, nproc),
            "PYTHONUNBUFFERED": 1,
            "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")])),
        }
        for rank in range(nproc):
            own = {"RANK": rank, "LOCAL_RANK": rank} | ({} if rank else {"STORE_FD": listener.fileno()})
            log = open(run_dir / "logs" / f"rank{rank}.log", "a") if rank else None
            with log or contextlib.nullcontext():
                ranks.append(
                    subprocess.Popen(
                        # -P: a file of the current directory must not shadow a package.
                        [sys.executable, "-P", "-m", "posttrain.command.rank", str(recipe), str(run_dir)],
                        env=scrubbed | {key: str(value) for key, value in (shared | own).items()},
                        stdin=subprocess.DEVNULL if rank else None,
                        stdout=log,
                        stderr=log,
                        pass_fds=[] if rank else [listener.fileno()],
                        preexec_fn=before_exec,
                    )
                )


def threads(cfg: JobConf, local_ranks: int) -> int:
    """CPU threads of a rank: launch.threads, or OMP_NUM_THREADS, or this process's cores over its ranks."""
    if cfg.launch.threads != "auto":
        return int(cfg.launch.threads)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(os.environ.get("OMP_NUM_THREADS") or max(1, cores // local_ranks))


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """SIGINT, SIGHUP or SIGQUIT raises Interrupted: the end is quick, and later signals are ignored.

    SIGTERM and SIGUSR1, by which schedulers ask for the room, are put into the list that is returned; a second one of
    them is as SIGINT.
    """
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        # In a thread of a parallel launcher signals are not ours to handle.
        yield asked
        return
    watched = (*STOP_SIGNALS, *preemption.SIGNALS)
    before = {s: signal.getsignal(s) for s in watched if signal.getsignal(s) is not signal.SIG_IGN}

    def stop(signum: int, frame: FrameType | None) -> None:
        if signum in preemption.SIGNALS and not asked:
            asked.append(signum)
            return
        for s in before:
            signal.signal(s, signal.SIG_IGN)
        raise Interrupted(signum)

    try:
        for s in before:
            signal.signal(s, stop)
        yield asked
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def _wait(ranks: list[subprocess.Popen], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.02)


def _end(ranks: list[subprocess.Popen]) -> None:
    for rank in ranks:
        # SIGTERM would ask for a checkpoint.
        rank.kill()
    _wait(ranks, GRACE_S)


def verdict(run_dir: Path) -> int:
    """The exit status of a run that ended well: a recipe that gives a verdict leaves it in summary.json."""
    from posttrain.tracking.files import drop_order, read_summary

    drop_order(run_dir)
    return int(read_summary(run_dir).get("exit_status", 0))


def close_run(run_dir: Path, status: str, error: str | None) -> None:
    """Write how the run ended into its summary.json. A resume that never went on leaves the run's record alone."""
    from posttrain.tracking.files import close_summary, drop_order

    try:
        if not drop_order(run_dir):
            close_summary(run_dir, status, error)
    except OSError as failure:
        print(f"summary.json could not be written: {failure}", file=sys.stderr)
