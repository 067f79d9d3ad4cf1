"""Starts the ranks of one job on this machine, watches them and reports how they ended. Imports no torch.

`python recipes/grpo.py` has read the command line and written the run directory's job.json; every rank is a
process `python -m posttrain.command.rank <recipe file> <run directory>`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
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
from typing import Any

from posttrain.config import JobConf

GRACE_S = 1.0  # a rank's peers have this long to end by themselves, then again after SIGTERM
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
    with _stop_signals_raise():
        try:
            _spawn(ranks, recipe, run_dir, cfg, nproc)
            codes = [rank.poll() for rank in ranks]
            while None in codes and not any(codes):
                time.sleep(0.05)
                codes = [rank.poll() for rank in ranks]
            # The peers of a failed rank get a moment: their errors may say more.
            _wait(ranks, GRACE_S)
            codes = [rank.poll() for rank in ranks]
        except Interrupted as stop:
            _end(ranks)
            close_run(run_dir, "interrupted", signal.Signals(stop.signum).name)
            print(f"interrupted; what is done is in {run_dir}", file=sys.stderr)
            return 128 + stop.signum
        finally:
            _end(ranks)
    if not any(codes):
        return verdict(run_dir)
    status, message = _why(run_dir, codes, cfg.debug)
    print(message, file=sys.stderr)
    close_run(run_dir, "failed", message)
    return status


def _spawn(ranks: list[subprocess.Popen], recipe: Path, run_dir: Path, cfg: JobConf, nproc: int) -> None:
    """Append one process a rank. The port is never free for others to take: rank 0 inherits its socket."""
    parent = os.getpid()
    libc = ctypes.CDLL(None)

    def before_exec() -> None:
        # Ctrl-C reaches every process of the terminal, and the parent decides.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
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
def _stop_signals_raise() -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP raises Interrupted, later ones are ignored: the end is quick."""
    if threading.current_thread() is not threading.main_thread():
        # In a thread of a parallel launcher signals are not ours to handle.
        yield
        return
    before = {s: signal.getsignal(s) for s in STOP_SIGNALS if signal.getsignal(s) is not signal.SIG_IGN}

    def stop(signum: int, frame: FrameType | None) -> None:
        for s in before:
            signal.signal(s, signal.SIG_IGN)
        raise Interrupted(signum)

    try:
        for s in before:
            signal.signal(s, stop)
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def _wait(ranks: list[subprocess.Popen], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.02)


def _end(ranks: list[subprocess.Popen]) -> None:
    for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
        for rank in ranks:
            end(rank)
        _wait(ranks, GRACE_S)


def _why(run_dir: Path, codes: list[int | None], debug: bool) -> tuple[int, str]:
    """Exit status and message for ranks that ended with `codes` (None: still running, negative: a signal).

    A rank that is gone without a word explains its peers' "connection reset"; only an abort is itself what a
    peer's error led to.
    """
    errors = rank_errors(run_dir)
    told = {error["rank"] for error in errors}
    lost = [(rank, code) for rank, code in enumerate(codes) if code and rank not in told]
    lost.sort(key=lambda each: each[1] == -signal.SIGABRT)
    if errors and (not lost or lost[0][1] == -signal.SIGABRT):
        return errors[0]["status"], errors[0]["traceback" if debug else "message"].rstrip()
    rank, code = lost[0]
    ended = f"ended with exit status {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
    memory = ", often because memory ran out" if code == -signal.SIGKILL else ""
    where = f"; its output: {run_dir / 'logs' / f'rank{rank}.log'}" if rank else ""
    return 1, f"rank {rank} {ended}{memory}{where}"


def rank_errors(run_dir: Path) -> list[dict[str, Any]]:
    """The exceptions that ranks of this run reported, the earliest first."""
    errors = [json.loads(path.read_text()) for path in (run_dir / "logs").glob("rank*.error.json")]
    return sorted(errors, key=lambda error: error["time"])


def verdict(run_dir: Path) -> int:
    """The exit status of a run that ended well: a recipe that gives a verdict leaves it in summary.json."""
    from posttrain.tracking.tracker import read_summary

    return int(read_summary(run_dir).get("exit_status", 0))


def close_run(run_dir: Path, status: str, error: str | None) -> None:
    """Write how the run ended into its summary.json."""
    from posttrain.tracking.tracker import close_summary

    try:
        close_summary(run_dir, status, error)
    except OSError as failure:
        print(f"summary.json could not be written: {failure}", file=sys.stderr)
