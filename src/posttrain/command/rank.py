"""What a rank does: join the others, import the recipe, call its `train(cfg, run_dir)`, report how it ended.

`launch.py` starts `python -m posttrain.command.rank <recipe file> <run directory>`. Under torchrun, accelerate launch
or srun the processes exist already: rank 0 reads the command line and hands the job to the others (`join`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import re
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from posttrain import preemption
from posttrain.command.failures import rank_errors, record
from posttrain.command.launch import close_run, threads, verdict, visible_gpus
from posttrain.command.order import read_order, resolved
from posttrain.command.output import make_best_effort
from posttrain.config import JobConf, LaunchConf
from posttrain.config.validation import typed
from posttrain.errors import UserError
from posttrain.preemption import EXIT_STATUS, Preempted
from posttrain.tracking import whereabouts

if TYPE_CHECKING:
    from torch.distributed import Store


def started_elsewhere() -> bool:
    """Is this process a rank already? torchrun and accelerate set RANK; for srun this sets it.

    SLURM_NTASKS does not tell: sbatch sets it too, for the one script that it runs.
    """
    env = os.environ
    if "RANK" not in env and int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        local, gpus = int(env["SLURM_LOCALID"]), visible_gpus()
        # "node[3-5],other" and "2(x3)": the first host is node3, which has two tasks.
        (host, number), *_ = re.findall(r"([^,\[]+)(?:\[(\d+))?", env.get("SLURM_STEP_NODELIST", "127.0.0.1"))
        tasks, *_ = re.findall(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", env["SLURM_STEP_NUM_TASKS"]))
        env["RANK"], env["WORLD_SIZE"] = env["SLURM_PROCID"], env["SLURM_STEP_NUM_TASKS"]
        # srun may show each task its own GPU only.
        env["LOCAL_RANK"] = str(local % gpus if gpus else local)
        env.setdefault("LOCAL_WORLD_SIZE", tasks)
        env.setdefault("MASTER_ADDR", host + number)
        env.setdefault("MASTER_PORT", str(20000 + int(env.get("SLURM_JOB_ID", 0)) % 20000))
    return "RANK" in env and "WORLD_SIZE" in env


def join(recipe: Path, read_command_line: Callable[[], dict[str, Any]]) -> NoReturn:
    """One rank of an external launcher. `read_command_line`, called on rank 0 alone, returns an order:

    {"exit": status, "job": plain values or None, "run_dir": path or None}.
    """
    _forget_accelerate()
    if sys.path[0] == str(recipe.parent):
        # recipes/evaluate.py must not shadow a package of that name.
        del sys.path[0]
    from torch.distributed import rendezvous

    store, rank, world = next(rendezvous("env://"))
    if rank == 0:
        order = read_command_line()
        store.set("posttrain/order", json.dumps(order))
        store.wait([f"posttrain/read/{peer}" for peer in range(1, world)] or ["posttrain/order"])
    else:
        order = json.loads(store.get("posttrain/order"))
        store.set(f"posttrain/read/{rank}", "")
    if order["job"] is None:
        _leave(order["exit"])
    run_dir = Path(order["run_dir"])
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    terminal = os.fdopen(os.dup(2), "w", buffering=1)
    make_best_effort()
    if rank > 0:
        log = os.open(logs / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log, stream.fileno())
    cfg = typed(recipe.stem, resolved(order["job"]))
    _watch_signals(run_dir, rank, cfg.launch, (signal.SIGINT, signal.SIGQUIT))
    status = _run(recipe, cfg, run_dir, store)
    if status and (errors := rank_errors(run_dir)):
        if errors[0]["rank"] == rank:
            print(errors[0]["traceback" if cfg.debug else "message"], file=terminal)
        if rank == 0:
            close_run(run_dir, "failed", errors[0]["message"])
    _leave(status or verdict(run_dir))


def start_process_group(timeout_s: float, store: Store | None = None) -> None:
    """torch.distributed over RANK and WORLD_SIZE: nccl for CUDA tensors, gloo for CPU ones."""
    import torch
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=timeout_s)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def _own_store(timeout_s: float) -> Store:
    """The store of ranks that launch.py started: rank 0 serves it on the socket it inherited."""
    from torch.distributed import TCPStore

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world,
        is_master=rank == 0,
        master_listen_fd=int(os.environ["STORE_FD"]) if rank == 0 else None,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def _run(recipe: Path, cfg: JobConf, run_dir: Path, store: Store) -> int:
    """Train; the exit status: 0, 2 for a user's mistake, 1 for another exception, then on record."""
    rank = int(os.environ["RANK"])
    try:
        whereabouts.begin(run_dir, rank)
        import torch

        count = threads(cfg, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        os.environ["OMP_NUM_THREADS"] = str(count)
        torch.set_num_threads(count)
        if not torch.cuda.is_available():
            # flash-linear-attention says so when transformers imports it; the banner names the kernels in use.
            warnings.filterwarnings("ignore", "Triton is not supported on current platform")
        start_process_group(cfg.launch.timeout_s, store)
        _import(recipe).train(cfg, run_dir)
    except Preempted:
        return 0 if cfg.launch.requeue else EXIT_STATUS
    # A SystemExit is an error too: a recipe ends by returning.
    except BaseException as error:
        return record(error, run_dir, cfg)
    return 0


def _import(recipe: Path) -> ModuleType:
    """The recipe as module recipe_<name>: its `if __name__ == "__main__"` line does nothing here."""
    spec = importlib.util.spec_from_file_location(f"recipe_{recipe.stem}", recipe)
    if spec is None or spec.loader is None:
        raise UserError(f"{recipe} is no Python file: a recipe ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _watch_signals(run_dir: Path, rank: int, launch: LaunchConf, ending: Collection[int]) -> None:
    """Act on signals at once, also inside a collective, where Python's handlers would wait.

    SIGTERM and SIGUSR1 ask for a checkpoint, which has `launch.grace_s`; `ending` end the process.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for signum in (*ending, *preemption.SIGNALS):
        signal.signal(signum, lambda *_: None)
    room = f"the run was asked to make room, and no checkpoint was written within launch.grace_s={launch.grace_s:g}"

    def end(status: str, message: str, code: int) -> None:
        # torchrun sends SIGTERM when a peer has failed: then there is an error on record.
        if rank == 0 and (errors := rank_errors(run_dir)):
            status, message = "failed", errors[0]["message"]
        if rank == 0:
            close_run(run_dir, status, message)
        os._exit(code)

    def watch() -> None:
        while True:
            signum = os.read(reader, 1)[0]
            if signum in ending:
                end("interrupted", signal.Signals(signum).name, 128 + signum)
            # Another signal, such as SIGCHLD of a data loader, is somebody else's.
            if signum not in preemption.SIGNALS or preemption.asked():
                continue
            preemption.ask()
            if not preemption.saves() or rank_errors(run_dir):
                end("preempted", "the run was asked to make room before its first step", EXIT_STATUS)
            late = threading.Timer(launch.grace_s, end, ("preempted", room, EXIT_STATUS))
            late.daemon = True
            late.start()

    threading.Thread(target=watch, name="signals", daemon=True).start()


def _forget_accelerate() -> None:
    """accelerate launch's choices must not override the config: strategy and precision come from there."""
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]


def _leave(status: int) -> NoReturn:
    """End without the interpreter's shutdown, which at times aborts in a communication thread of torch."""
    if status == 0:
        import torch.distributed as dist

        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
    for found in gc.get_objects():
        if type(found) is tempfile.TemporaryDirectory:
            # Those of wandb go in the interpreter's shutdown, which does not come.
            with contextlib.suppress(OSError):
                found.cleanup()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def main() -> NoReturn:
    import faulthandler

    faulthandler.enable()
    make_best_effort()
    recipe, run_dir = map(Path, sys.argv[1:])
    cfg = typed(recipe.stem, read_order(run_dir))
    _watch_signals(run_dir, int(os.environ["RANK"]), cfg.launch, ())
    _leave(_run(recipe, cfg, run_dir, _own_store(cfg.launch.timeout_s)))


if __name__ == "__main__":
    main()
