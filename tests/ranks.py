"""Real ranks for a test: processes of one process group on gloo.

They are forked from a process that has imported all that a recipe imports, which takes most of a small job's time, and
that has no threads. What a command does beyond this (Hydra, the run directory, watching ranks) has tests of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from posttrain.command.rank import start_process_group

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["posttrain.run", "posttrain.rollout.sampler"])


class Ended(NamedTuple):
    status: int  # 0, or the largest of the ranks' exit statuses; of a signal its number
    output: str  # of all ranks, one after the other


def on_ranks(count: int, function: Callable[..., None], *arguments: Any, timeout: float = 280) -> Ended:
    """`function(*arguments)`, of a module's own level, on each of `count` ranks, which know each other already."""
    shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "CUDA_VISIBLE_DEVICES": ""}
    latest = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(count):
            own = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(FORKS.Process(target=_rank, args=(function, arguments, Path(folder), own)))
            ranks[-1].start()
        for process in ranks:
            process.join(max(0, latest - time.monotonic()))
            if process.is_alive():
                (Path(folder) / "output_late").write_text(f"killed after {timeout:g} s: {process.name}\n")
            process.kill()
            process.join()
        said = [output.read_text() for output in sorted(Path(folder).glob("output*"))]
    return Ended(max(abs(process.exitcode) for process in ranks), "\n".join(said))


def _rank(function: Callable[..., None], arguments: tuple, folder: Path, environment: dict[str, str]) -> None:
    with (folder / f"output{environment['RANK']}").open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
            stream.reconfigure(line_buffering=True)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    # No port to race for.
    start_process_group(120, dist.FileStore(str(folder / "store"), int(environment["WORLD_SIZE"])))
    function(*arguments)
    dist.destroy_process_group()
