"""A run's record: metrics.jsonl, summary.json, the console, and wandb if asked for.

The files are the contract that notebooks and tests read. wandb is a copy for convenience: it lives in a
thread of its own, so that neither a dead server nor a killed service makes a step wait, let alone fail.
Imports neither torch nor wandb: the process that starts the ranks closes the summary of ranks that died.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import sys
import threading
from pathlib import Path
from typing import Any

from posttrain.config import LoggerConf, LoggerName, WandbMode
from posttrain.console import banner, closing

METRICS, SUMMARY = "metrics.jsonl", "summary.json"
WANDB_INIT_S, WANDB_FINISH_S = 30, 30
SHOWN = {  # metric: label and format on the console
    "reward": ("reward", ".3f"),
    "loss": ("loss", ".4f"),
    "perf/tokens_per_second": ("tokens/s", ",.0f"),
    "perf/step_time": ("s", ".2f"),
}


class Tracker:
    """Writes on the main rank; on every other rank each method does nothing.

    As a context manager it closes the run with the status "completed", "interrupted" (KeyboardInterrupt,
    SystemExit) or "failed". Opened on a directory that holds records it goes on after them.
    """

    def __init__(
        self, run_dir: Path, cfg: LoggerConf, is_main: bool, config: dict[str, Any], total_steps: int
    ) -> None:
        self.run_dir, self.cfg, self.config = run_dir, cfg, config
        self.is_main, self.total_steps = is_main, total_steps
        self._wandb: _Wandb | None = None
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
            self._wandb = _Wandb(self.run_dir, self.cfg, self.config, (before.get("logger") or {}).get("id"))
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
        if not self._open:
            return
        numbers = {key: value.item() if hasattr(value, "item") else value for key, value in metrics.items()}
        numbers = {key: value for key, value in numbers.items() if value is not None and math.isfinite(value)}
        self._file.write(json.dumps({"step": step} | numbers) + "\n")
        self._file.flush()
        if self._wandb:
            self._wandb.records.put((step, numbers))
            self._say_if_wandb_failed()
        self._show(step, numbers)

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
        shown = {label: format(numbers[key], spec) for key, (label, spec) in SHOWN.items() if key in numbers}
        if self._bar is None:
            words = [f"step {step}/{self.total_steps}", *(f"{label} {text}" for label, text in shown.items())]
            self._print("  ".join(words))
        else:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(step - self._bar.n)

    def _print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        else:
            print(text, flush=True)

    def _say_if_wandb_failed(self) -> None:
        if self._wandb.reason and not self._wandb.said:
            self._wandb.said = True
            self._print(f"wandb is off, metrics go on in {self.run_dir / METRICS}: {self._wandb.reason}")
            merge_summary(self.run_dir, logger=self._wandb.state())


class _Wandb(threading.Thread):
    """The only place that talks to wandb. `reason` is set when it failed; records are then dropped."""

    def __init__(self, run_dir: Path, cfg: LoggerConf, config: dict[str, Any], run_id: str | None) -> None:
        super().__init__(name="wandb", daemon=True)
        self.online = cfg.mode == WandbMode.online and os.environ.get("WANDB_MODE", "online") == "online"
        self.arguments = {
            "project": cfg.project, "name": cfg.run_name or run_dir.name, "dir": str(run_dir),
            "config": config, "id": run_id, "resume": "allow" if run_id and self.online else None,
            "mode": None if cfg.mode == WandbMode.online else "offline",
        }  # fmt: skip
        self.records: queue.SimpleQueue[tuple[int, dict[str, float]] | int] = queue.SimpleQueue()
        self.id, self.url, self.reason, self.said = run_id, None, None, False

    def run(self) -> None:
        try:
            import wandb

            quiet = dict(init_timeout=WANDB_INIT_S, finish_timeout=WANDB_FINISH_S, console="off", silent=True)
            wandb.setup(wandb.Settings(**quiet))
            if self.online and not wandb.login(prompt=False):
                raise PermissionError("no API key; set WANDB_API_KEY, or logger.mode=offline")
            session = wandb.init(**self.arguments, settings=wandb.Settings(**quiet))
            self.id, self.url = session.id, session.url
            while isinstance(item := self.records.get(), tuple):
                step, numbers = item
                session.log(numbers, step=step)
            session.finish(exit_code=item)
        except Exception as error:
            self.reason = self.reason or f"{type(error).__name__}: {error}"
            _teardown_wandb()

    def close(self, exit_code: int) -> None:
        """Wait for wandb to finish, within bounds."""
        self.records.put(exit_code)
        self.join(WANDB_INIT_S + WANDB_FINISH_S)
        if self.is_alive():
            self.reason = self.reason or f"did not finish within {WANDB_INIT_S + WANDB_FINISH_S} s"
            _teardown_wandb()

    def state(self) -> dict[str, Any]:
        state = {"name": "wandb", "available": not self.reason, "reason": self.reason}
        return state | {"id": self.id, "url": self.url}


def _teardown_wandb() -> None:
    """Take down a broken wandb now, within bounds; its exit hook would wait for it, or end in a traceback."""
    import wandb

    def teardown() -> None:
        with contextlib.suppress(Exception):  # what broke it is told already
            wandb.teardown(exit_code=1)

    thread = threading.Thread(target=teardown, name="wandb teardown", daemon=True)
    thread.start()
    thread.join(5)


def read_records(run_dir: Path) -> list[dict[str, float]]:
    """The records of metrics.jsonl; a last line torn by the death of its writer is left out."""
    path = run_dir / METRICS
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
    return [json.loads(line) for line in lines[:-1]]  # what follows the last newline is nothing, or torn


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
    summary = read_summary(run_dir) | fields
    _write(run_dir / SUMMARY, json.dumps(summary, indent=2) + "\n")
    return summary


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
        seconds={phase[5:]: sum(record.get(phase, 0) for record in records) for phase in phases},
    )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _write(path: Path, text: str) -> None:
    """Replace a file in one step: a reader, or a crash, sees the old text or the new."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
