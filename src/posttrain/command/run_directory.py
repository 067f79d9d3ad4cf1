"""The directory of a run: its name, who may write there, and what a resumed run changes."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from posttrain.config.validation import changes
from posttrain.errors import UserError
from posttrain.tracking.files import ORDERS, drop_order, read_records, read_summary

# Of the name of a sweep job's directory; file systems allow 255.
NAME_LENGTH = 120


def claim(cfg: DictConfig, values: dict[str, Any]) -> tuple[Path, int]:
    """This job's run directory, holding config.yaml (interpolations unresolved) and job.json (resolved).

    Also returns a locked file descriptor: while it is open no other run takes the directory, not even with
    resume=auto. Whoever creates job.json owns a new directory.
    """
    hydra_cfg = HydraConfig.get()
    mine = ("hydra.run.dir=", "hydra.sweep.dir=", "hydra.sweep.subdir=")
    chosen = any(override.startswith(mine) for override in hydra_cfg.overrides.hydra)
    resume = values.get("resume") == "auto"
    if resume and not chosen:
        raise UserError("resume=auto goes on with the run in a directory: type hydra.run.dir=<directory> too")
    made = wanted = Path(hydra_cfg.runtime.output_dir)
    if hydra_cfg.mode is RunMode.MULTIRUN and made.name == str(hydra_cfg.job.num):
        wanted = made.with_name(file_name(hydra_cfg.job.override_dirname) or made.name)
    for attempt in itertools.count():
        run_dir = wanted.with_name(f"{wanted.name}_{attempt}") if attempt else wanted
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            taken = not resume and not _never_began(run_dir)
            lock = os.open(run_dir / "job.json", os.O_RDWR | os.O_CREAT | (os.O_EXCL if taken else 0), 0o666)
        except FileExistsError:
            if chosen:
                advice = ", or type resume=auto to go on with it" * ("resume" in values)
                raise UserError(f"{run_dir} holds a run already: choose another{advice}") from None
        else:
            break  # else the name, a time, is taken by another run of the same second
    if wanted != made:
        with contextlib.suppress(OSError):
            made.rmdir()
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise UserError(f"{run_dir}: another run is at work in it") from None
    except OSError as error:
        print(f"{run_dir}: no lock guards it against a second run: {error.strerror}", file=sys.stderr)
    for stale in (run_dir / "logs").glob("rank*.error.json"):
        stale.unlink()
    drop_order(run_dir)
    if resume:
        _refuse_to_repeat(run_dir)
    if values.get("resume"):
        _say_what_changes(run_dir if resume else Path(values["resume"]), values)
    # The record of a run that is resumed changes when training goes on, see adopt_order.
    job, config = list(ORDERS) if resume and os.fstat(lock).st_size else list(ORDERS.values())
    OmegaConf.save(cfg, run_dir / config)
    if job == "job.json":
        os.ftruncate(lock, 0)
        os.write(lock, json.dumps(values, indent=1).encode())
    else:
        (run_dir / job).write_text(json.dumps(values, indent=1))
    return run_dir, lock


def _refuse_to_repeat(run_dir: Path) -> None:
    """Raises UserError where resume=auto would begin again, over the records of a run that is complete."""
    if any(run_dir.glob("checkpoints/step_*")) or read_summary(run_dir).get("status") != "completed":
        return
    records = sum(1 for _ in read_records(run_dir))
    if records:
        raise UserError(
            f"resume=auto: {run_dir} holds a completed run of {records} records and no checkpoint to go on from: "
            "choose another hydra.run.dir"
        )


def _never_began(run_dir: Path) -> bool:
    """Did the run in this directory fail before its first record? Then another one may have its place."""
    records, summary = run_dir / "metrics.jsonl", run_dir / "summary.json"
    if any(run_dir.glob("checkpoints/step_*")) or (records.exists() and records.stat().st_size):
        return False
    return summary.exists() and json.loads(summary.read_text()).get("status") == "failed"


def _say_what_changes(resumed: Path, values: dict[str, Any]) -> None:
    """One line for each value that differs from the job of a run directory, or of a checkpoint's."""
    for job in (resumed / "job.json", resumed.parent.parent / "job.json"):
        if job.is_file():
            for change in changes(job.read_bytes(), values):
                print(f"resumed with {change}", file=sys.stderr)
            return


def file_name(name: str) -> str:
    """`name` without what hurts in a path, and bounded: a hash stands for what is cut off."""
    safe = re.sub(r"[^\w.,+-]+", "-", name, flags=re.ASCII)
    cut = f"{safe[:NAME_LENGTH]}-{hashlib.sha1(name.encode()).hexdigest()[:8]}"
    return safe if len(safe) <= NAME_LENGTH else cut
