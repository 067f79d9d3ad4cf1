"""A run's record: metrics.jsonl, summary.json, the console, and wandb if asked for.

The files are the contract that notebooks and tests read. wandb is a copy for convenience: it lives in a
thread of its own, so that neither a dead server nor a killed service makes a step wait, let alone fail.
Imports neither torch nor wandb: the process that starts the ranks closes the summary of ranks that died.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from posttrain.config import LoggerConf, LoggerName
from posttrain.tracking.console import banner, closing
from posttrain.tracking.wandb_log import WandbLog

METRICS, SUMMARY = "metrics.jsonl", "summary.json"
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

    As a context manager it closes the run with the status "completed", "interrupted" (KeyboardInterrupt,
    SystemExit) or "failed". Opened on a directory that holds records it goes on after them.
    """

    def __init__(self, run_dir: Path, cfg: LoggerConf, is_main: bool, config: dict[str, Any], total_steps: int) -> None:
        self.run_dir, self.cfg, self.config = run_dir, cfg, config
        self.is_main, self.total_steps = is_main, total_steps
        self._wandb: WandbLog | None = None
        self._bar = None
        self._open = False

    def __enter__(self) -> Tracker:
        if not self.is_main:
            return self
        self.run_dir.mkdir(parents=True, exist_ok=True)
        records = truncate_after(self.run_dir, math.inf)
        self._file = (self.run_dir / METRICS).open("a", encoding="utf-8")
        before = read_summary(self.run_dir)
        _write(self.run_dir / SUMMARY, json.dumps({"status": "running", "logger": before.get("logger")}))
        if self.cfg.name == LoggerName.wandb:
            self._wandb = WandbLog(self.run_dir, self.cfg, self.config, (before.get("logger") or {}).get("id"))
            self._wandb.start()
        if sys.stdout.isatty():
            from tqdm import tqdm

            done = records[-1]["step"] if records else 0
            self._bar = tqdm(total=self.total_steps, initial=done, unit="step", file=sys.stdout)
        self._open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.finish("completed")
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
        self._file.write(json.dumps({"step": step} | numbers) + "\n")
        self._file.flush()
        if self._wandb:
            self._wandb.records.put((step, numbers))
            self._say_if_wandb_failed()
        self._show(step, numbers)

    def warn(self, of: str, warnings: list[str]) -> None:
        """Say each warning on a line of its own, and keep them in summary.json."""
        if not self._open:
            return
        for warning in warnings:
            self._print(f"warning ({of}): {warning}")
        merge_summary(self.run_dir, warnings={**read_summary(self.run_dir).get("warnings", {}), of: warnings})

    def summary(self, **fields: Any) -> None:
        """Merge fields into summary.json."""
        if self._open:
            merge_summary(self.run_dir, **fields)

    def finish(self, status: str, error: str | None = None) -> None:
        """Close the run's files and print the closing table. The first call counts."""
        if not self._open:
            return
        self._open = False
        self._file.close()
        if self._bar is not None:
            self._bar.close()
        if self._wandb:
            self._wandb.close(exit_code=0 if status == "completed" else 1)
            self._say_if_wandb_failed()
            merge_summary(self.run_dir, logger=self._wandb.state())
        summary = close_summary(self.run_dir, status, error)
        self._print(closing(summary))

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


def read_records(run_dir: Path) -> list[dict[str, float]]:
    """The records of metrics.jsonl; a last line torn by the death of its writer is left out."""
    path = run_dir / METRICS
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
    # After the last newline there is nothing, or a torn record.
    return [json.loads(line) for line in lines[:-1]]


def truncate_after(run_dir: Path, step: float) -> list[dict[str, float]]:
    """Drop the records beyond `step`, which a resumed run writes again, and a torn line. Returns the rest."""
    records = [record for record in read_records(run_dir) if record["step"] <= step]
    if (run_dir / METRICS).exists():
        _write(run_dir / METRICS, "".join(json.dumps(record) + "\n" for record in records))
    return records


def read_summary(run_dir: Path) -> dict[str, Any]:
    path = run_dir / SUMMARY
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def merge_summary(run_dir: Path, **fields: Any) -> dict[str, Any]:
    """Merge fields into summary.json, which is whole at any moment."""
    summary: dict[str, Any] = finite(read_summary(run_dir) | fields)
    _write(run_dir / SUMMARY, json.dumps(summary, indent=2, allow_nan=False) + "\n")
    return summary


def finite(value: Any) -> Any:
    """The same nested lists and dicts with null for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def close_summary(run_dir: Path, status: str, error: str | None = None) -> dict[str, Any]:
    """Finalise summary.json from metrics.jsonl, and return it. `status` is completed, failed or interrupted.

    An error that a rank wrote is kept unless the caller gives one.
    """
    records = read_records(run_dir)
    rewards = [record["reward"] for record in records if "reward" in record]
    tenth = max(1, len(rewards) // 10)
    phases = sorted({key for record in records for key in record if key.startswith("time/")})
    return merge_summary(
        run_dir,
        status=status,
        error=error or (read_summary(run_dir).get("error") if status != "completed" else None),
        steps=records[-1]["step"] if records else 0,
        reward={"first_tenth": _mean(rewards[:tenth]), "last_tenth": _mean(rewards[-tenth:])},
        tokens=sum(record.get("num_tokens", 0) for record in records),
        skipped_updates=sum(record.get("skipped_updates", 0) for record in records),
        seconds={phase[5:]: sum(record.get(phase, 0) for record in records) for phase in phases},
    )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _write(path: Path, text: str) -> None:
    """Replace a file in one step: a reader, or a crash, sees the old text or the new."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
