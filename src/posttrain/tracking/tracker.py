"""A run's record: metrics.jsonl, summary.json, the console, and wandb if asked for.

The files are the contract that notebooks and tests read. wandb is a copy for convenience: it lives in a
thread of its own, so that neither a dead server nor a killed service makes a step wait, let alone fail.
Imports neither torch nor wandb.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from posttrain.config import LoggerConf, LoggerName
from posttrain.preemption import Preempted
from posttrain.tracking.console import banner, closing
from posttrain.tracking.files import (
    METRICS,
    adopt_order,
    close_summary,
    merge_summary,
    new_summary,
    read_summary,
    reserve_room,
    set_aside,
    truncate_after,
)
from posttrain.tracking.wandb_log import WandbLog

SHOWN = {  # metric: label and format on the console
    "reward": ("reward", ".3f"),
    "loss": ("loss", ".4f"),
    "grad_norm": ("grad norm", ".3f"),
    "perf/tokens_per_second": ("tokens/s", ",.0f"),
    "perf/step_time": ("s", ".2f"),
    "eval/reward": ("held out: reward", ".3f"),
    "eval/rewards/correct": ("correct", ".3f"),
}


class Tracker:
    """Writes on the main rank; on every other rank each method does nothing.

    As a context manager it closes the run with the status "completed", "preempted", "interrupted" (KeyboardInterrupt,
    SystemExit) or "failed". Opened on a directory that holds records it goes on after those of the first `start` steps.
    """

    def __init__(
        self, run_dir: Path, cfg: LoggerConf, is_main: bool, total_steps: int, start: float = math.inf
    ) -> None:
        self.run_dir, self.cfg, self.start_after = run_dir, cfg, start
        self.is_main, self.total_steps = is_main, total_steps
        self._wandb: WandbLog | None = None
        self._bar = None
        self._open = False

    def __enter__(self) -> Tracker:
        if not self.is_main:
            return self
        self.run_dir.mkdir(parents=True, exist_ok=True)
        if self.start_after == 0:
            # The run died before its first checkpoint.
            set_aside(self.run_dir)
        done = truncate_after(self.run_dir, self.start_after)
        adopt_order(self.run_dir)
        reserve_room(self.run_dir)
        self._file = (self.run_dir / METRICS).open("a", encoding="utf-8")
        before = read_summary(self.run_dir)
        new_summary(self.run_dir, status="running", logger=before.get("logger"))
        if self.cfg.name == LoggerName.wandb:
            self._wandb = WandbLog(self.run_dir, self.cfg, self._job(), (before.get("logger") or {}).get("id"))
            self._wandb.start()
        if sys.stdout.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self.total_steps, initial=done, unit="step", file=sys.stdout)
        self._open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.finish("completed")
        elif kind is Preempted:
            self.finish("preempted", "the run was asked to make room: type resume=auto to go on")
        else:
            interrupted = issubclass(kind, KeyboardInterrupt | SystemExit)
            self.finish("interrupted" if interrupted else "failed", f"{kind.__name__}: {error}")

    def start(self, facts: dict[str, Any]) -> None:
        """Put what this run is into summary.json, and print the banner of it."""
        if self._open:
            self._print(banner(merge_summary(self.run_dir, **facts)))

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Append one record of numbers or one-element tensors; None, NaN and infinities are left out."""
        if not self._open or not metrics:
            return
        numbers = {key: value.item() if hasattr(value, "item") else value for key, value in metrics.items()}
        numbers = {key: value for key, value in numbers.items() if value is not None and math.isfinite(value)}
        self.check()
        self._file.write(json.dumps({"step": step} | numbers) + "\n")
        self._file.flush()
        if self._wandb:
            self._wandb.records.put((step, numbers))
            self._say_if_wandb_failed()
        self._show(step, numbers)

    def check(self) -> None:
        """Raises FileNotFoundError where nobody will find what is written."""
        path = self.run_dir / METRICS
        if self._open and not (path.exists() and os.path.samestat(path.stat(), os.fstat(self._file.fileno()))):
            raise FileNotFoundError(f"{path} was deleted or moved while the run was at work")

    def sync(self) -> None:
        """The records are on the disk: a checkpoint will say that these steps are done."""
        self.check()
        if self._open:
            os.fsync(self._file.fileno())

    def warn(self, of: str, warnings: list[str]) -> None:
        """Say each warning on a line of its own, and keep them in summary.json."""
        if not self._open:
            return
        for warning in warnings:
            self._print(f"warning ({of}): {warning}")
        merge_summary(self.run_dir, warnings={**read_summary(self.run_dir).get("warnings", {}), of: warnings})

    def summary(self, **fields: Any) -> None:
        """Merge fields into summary.json."""
        self.check()
        if self._open:
            merge_summary(self.run_dir, **fields)

    def finish(self, status: str, error: str | None = None) -> None:
        """Close the run's files and print the closing table. The first call counts.

        Raises OSError where a completed run cannot be recorded as one; a run that failed says why it failed instead.
        """
        if not self._open:
            return
        self._open = False
        if self._bar is not None:
            self._bar.close()
        try:
            self._file.close()
            if self._wandb:
                self._wandb.close(exit_code=0 if status == "completed" else 1)
                self._say_if_wandb_failed()
                merge_summary(self.run_dir, logger=self._wandb.state())
            self._print(closing(close_summary(self.run_dir, status, error)))
        except OSError as failure:
            if status == "completed":
                raise
            gone = not self.run_dir.is_dir()
            why = f"{self.run_dir} was deleted or moved while the run was at work" if gone else str(failure)
            self._print(f"the end of the run is not on record: {why}")

    def _job(self) -> dict[str, Any]:
        """The job as its file has it: what came from the environment is not resolved there."""
        path = self.run_dir / "job.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def _show(self, step: int, numbers: dict[str, float]) -> None:
        shown = {label: f"{numbers[key]:{form}}" for key, (label, form) in SHOWN.items() if key in numbers}
        if not shown:
            return
        if self._bar is None or "eval/reward" in numbers:
            self._print("  ".join([f"step {step}/{self.total_steps}", *(f"{k} {text}" for k, text in shown.items())]))
            return
        self._bar.set_postfix({key: shown[key] for key in ("reward", "tokens/s") if key in shown}, refresh=False)
        self._bar.update(step - self._bar.n)

    def _print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        else:
            print(text, flush=True)

    def _say_if_wandb_failed(self) -> None:
        log = self._wandb
        if log is not None and log.reason and not log.said:
            log.said = True
            self._print(f"wandb is off, metrics go on in {self.run_dir / METRICS}: {log.reason}")
            merge_summary(self.run_dir, logger=log.state())
