"""Where each rank is, for whoever has to say why a run stands still: a step and a phase, and a sign of life.

A rank writes `logs/rank<n>.at` when it comes to another phase, and touches the file once a second from a thread of its
own. A rank that waits for another one is told apart from the one that is waited for: it is a phase ahead. A process
that is stopped, or whose machine is gone, touches nothing. Imports no torch: the process that starts the ranks reads
it.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

BEAT_S = 1.0
# A process this long without a sign of life is stopped: its thread needs no lock but Python's own.
SILENT_S = 5.0
# The file has its size from the first line on: a full disk takes no part of it.
WIDTH = 120

LOWER_MEMORY = {
    "rollout": "rollout.batch_size (sequences decoded together) or rollout.max_new_tokens",
    "evaluation": "rollout.batch_size (sequences decoded together) or rollout.max_new_tokens",
    "update": "packing.tokens_per_row, or type model.gradient_checkpointing=true or fsdp=full_shard",
    "logprobs": "packing.tokens_per_row",
    "metrics": "packing.tokens_per_row, or type metrics.full_every=0",
    "checkpoint": "nothing, but type checkpoint.asynchronous=false if CPU memory ran out",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Of one rank, as its file says."""

    rank: int
    step: int  # from 1; 0: none has begun
    phase: str
    number: int  # of the phases so far
    silent_s: float  # since its last sign of life
    since_s: float  # in this phase

    def __str__(self) -> str:
        where = f"phase {self.phase}" if self.phase != "start" else "the start-up"
        return f"{where} of step {self.step}" if self.step else where


class Whereabouts:
    """This rank's file. The thread of it ends with the process."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._path, self._rank, self._number = run_dir / "logs" / f"rank{rank}.at", rank, 0
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        self.at(0, "start")
        threading.Thread(target=self._beat, name="whereabouts", daemon=True).start()

    def at(self, step: int, phase: str) -> None:
        """This rank comes to a phase. What cannot be written is left out: it is of no use to the run itself."""
        self._number += 1
        text = json.dumps({"step": step, "phase": phase, "number": self._number, "since": time.time()})
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._descriptor, text.ljust(WIDTH).encode() + b"\n", 0)

    def _beat(self) -> None:
        while self._descriptor is not None:
            time.sleep(BEAT_S)
            with contextlib.suppress(OSError):
                os.utime(self._descriptor)


_here: Whereabouts | None = None


def begin(run_dir: Path, rank: int) -> None:
    """From here on this process says where it is."""
    global _here
    _here = Whereabouts(run_dir, rank)


def at(step: int, phase: str) -> None:
    """This process comes to a phase of a step, from 1; says nothing in a process that has not begun to."""
    if _here is not None:
        _here.at(step, phase)


def places(run_dir: Path) -> list[Place]:
    """Of the ranks whose files are there, by rank."""
    found = []
    for path in run_dir.glob("logs/rank*.at"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            said = json.loads(path.read_text())
            now = time.time()
            silent, since = now - path.stat().st_mtime, now - said["since"]
            rank = int(path.stem.removeprefix("rank"))
            found.append(Place(rank, said["step"], said["phase"], said["number"], silent, since))
    return sorted(found, key=lambda place: place.rank)


def who_is_waited_for(run_dir: Path, timeout_s: float) -> str | None:
    """The rank that the others wait for, where it is and why, in words; None if the files do not tell."""
    ranks = places(run_dir)
    if len(ranks) < 2:
        return None
    silent = [place for place in ranks if place.silent_s > SILENT_S]
    if silent:
        place = max(silent, key=lambda each: each.silent_s)
        cause = f"its process has been stopped, or its machine is gone, for {place.silent_s:.0f} s"
    else:
        place = min(ranks, key=lambda each: each.number)
        if place.number == max(each.number for each in ranks):
            return f"every rank is in {place}, and a collective in it took longer than launch.timeout_s={timeout_s:g}"
        cause = f"it has been there for {place.since_s:.0f} s, and the others waited launch.timeout_s={timeout_s:g}"
    return f"rank {place.rank} stands still in {place}: {cause}"


def memory_advice(run_dir: Path, rank: int) -> str:
    """In which phase a rank's memory ran out, and the options that lower it."""
    place = next((place for place in places(run_dir) if place.rank == rank), None)
    if place is None:
        return ""
    return f" in {place}; what lowers it: {LOWER_MEMORY.get(place.phase, 'a smaller model or fewer ranks here')}"
