"""How a rank failed, and what the process that started it says of it. Imports no torch."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.config import JobConf
from posttrain.errors import UserError
from posttrain.tracking.whereabouts import memory_advice, who_is_waited_for

# The last one is oneDNN's.
NO_MEMORY = re.compile("out of memory|allocate memory|enough memory|could not create a primitive")


def record(error: BaseException, run_dir: Path, cfg: JobConf) -> int:
    """Write the error for the parent or the peers to read, and its traceback into this rank's log."""
    rank, user = int(os.environ["RANK"]), isinstance(error, UserError)
    log = run_dir / "logs" / f"rank{rank}.log"
    first_line = (str(error).strip() or "no message").splitlines()[0]
    status, trace = 2 if user else 1, "".join(traceback.format_exception(error))
    message = f"rank {rank}: {type(error).__name__}: {first_line}{_out_of_memory(error, run_dir, rank)} (see {log})"
    if re.search("timed out|timeout", str(error), re.IGNORECASE):
        # In the words of a communication library it is a file and a line of its own source.
        waited_for = who_is_waited_for(run_dir, cfg.launch.timeout_s)
        message = f"{waited_for} (see {log})" if waited_for else message
    record = {
        "rank": rank,
        "time": time.time(),
        "status": status,
        "message": str(error) if user else message,
        "traceback": trace,
    }
    try:
        with open(log, "a") as file:
            file.write(trace)
        temporary = log.with_suffix(".error.tmp")
        temporary.write_text(json.dumps(record))
        temporary.rename(log.with_suffix(".error.json"))
    # The disk is full, which often is the error itself.
    except OSError as failure:
        print(f"rank {rank}: {type(error).__name__}: {error} (not on record: {failure})", file=sys.stderr)
    return status


def _out_of_memory(error: BaseException, run_dir: Path, rank: int) -> str:
    """The phase in which memory ran out and what lowers it; nothing for another error."""
    short = isinstance(error, MemoryError) or NO_MEMORY.search(str(error))
    return f",{memory_advice(run_dir, rank)}" if short else ""


def why(run_dir: Path, codes: Sequence[int | None], cfg: JobConf) -> tuple[int, str]:
    """Exit status and message for ranks that ended with `codes` (None: still running, negative: a signal).

    A rank that is gone without a word explains its peers' "connection reset"; only an abort is itself what a
    peer's error led to.
    """
    errors = rank_errors(run_dir)
    told = {error["rank"] for error in errors}
    lost = [(rank, code) for rank, code in enumerate(codes) if code and rank not in told]
    lost.sort(key=lambda each: each[1] == -signal.SIGABRT)
    aborted = bool(lost) and lost[0][1] == -signal.SIGABRT
    if errors and (not lost or aborted):
        return errors[0]["status"], errors[0]["traceback" if cfg.debug else "message"].rstrip()
    rank, code = lost[0]
    ended = f"ended with exit status {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
    where = f"; its output: {run_dir / 'logs' / f'rank{rank}.log'}" if rank else ""
    if aborted and (waited_for := who_is_waited_for(run_dir, cfg.launch.timeout_s)):
        # NCCL ends a process whose collective takes too long.
        where += f"; {waited_for}"
    memory = f", often because memory ran out{memory_advice(run_dir, rank)}" if code == -signal.SIGKILL else ""
    return 1, f"rank {rank} {ended}{memory}{where}"


def rank_errors(run_dir: Path) -> list[dict[str, Any]]:
    """The exceptions that ranks of this run reported, the earliest first."""
    errors = [json.loads(path.read_text()) for path in (run_dir / "logs").glob("rank*.error.json")]
    return sorted(errors, key=lambda error: error["time"])
