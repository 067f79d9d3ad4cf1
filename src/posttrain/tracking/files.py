"""The files of a run that notebooks, tests and the process that starts the ranks read: metrics.jsonl and summary.json.

Imports no torch. Each file is whole at any moment, but for the last line of metrics.jsonl, and is read as a stream.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from posttrain.errors import UserError

METRICS, SUMMARY = "metrics.jsonl", "summary.json"
# What a job is, and what a resumed one will be once training goes on.
ORDERS = {"job.next.json": "job.json", "config.next.yaml": "config.yaml"}
# Half-written, and of no use: a death leaves it behind, and a status may need its room.
HALVES = ("checkpoints/partial_*", "checkpoints/removed_*", "model.partial*", "*.tmp", "logs/reserve")
# A full disk has this much room for the status of the run that filled it.
RESERVE = 64 * 1024


def read_records(run_dir: Path) -> Iterator[dict[str, float]]:
    """The records of metrics.jsonl, one at a time; a last line torn by the death of its writer is left out.

    Raises UserError for a line that is no record, with the file and the number of the line.
    """
    path = run_dir / METRICS
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, 1):
            # After the last newline there is nothing, or a torn record.
            if line.endswith("\n"):
                yield _record(line, f"{path}, line {number}")


def history(run_dir: Path, metric: str, step: float) -> list[float]:
    """The values of a metric up to `step`, in the order of the records."""
    return [each[metric] for each in read_records(run_dir) if each["step"] <= step and metric in each]


def _record(line: str, where: str) -> dict[str, float]:
    try:
        record: dict[str, float] = json.loads(line)
        float(record["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{where} is no record, but {line.strip()[:40]!r}: delete the line") from error
    return record


def truncate_after(run_dir: Path, step: float) -> int:
    """Drop the records beyond `step`, which a resumed run writes again, and a torn line. Returns the last step left."""
    path, last = run_dir / METRICS, 0
    if path.exists():
        with _replacing(path) as file:
            for record in read_records(run_dir):
                if record["step"] <= step:
                    file.write(json.dumps(record) + "\n")
                    last = int(record["step"])
    return last


def set_aside(run_dir: Path) -> None:
    """Keep the records of a run that begins again as metrics.1.jsonl, or the next number."""
    path, number = run_dir / METRICS, 1
    if path.exists() and path.stat().st_size:
        while (beside := run_dir / f"metrics.{number}.jsonl").exists():
            number += 1
        path.rename(beside)


def read_summary(run_dir: Path) -> dict[str, Any]:
    path = run_dir / SUMMARY
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def merge_summary(run_dir: Path, **fields: Any) -> dict[str, Any]:
    """Merge fields into summary.json, which is whole at any moment."""
    summary: dict[str, Any] = finite(read_summary(run_dir) | fields)
    with _replacing(run_dir / SUMMARY) as file:
        file.write(json.dumps(summary, indent=2, allow_nan=False) + "\n")
    return summary


def new_summary(run_dir: Path, **fields: Any) -> None:
    """A summary of these fields alone."""
    with _replacing(run_dir / SUMMARY) as file:
        file.write(json.dumps(fields))


def finite(value: Any) -> Any:
    """The same nested lists and dicts with null for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def close_summary(run_dir: Path, status: str, error: str | None = None) -> dict[str, Any]:
    """Finalise summary.json from metrics.jsonl, and return it: "completed", "failed", "interrupted" or "preempted".

    An error that a rank wrote is kept unless the caller gives one. What a run that ended has left half-written goes
    first: on a full disk it makes the room.
    """
    free_room(run_dir)
    kept = read_summary(run_dir).get("error") if status != "completed" else None
    try:
        totals = _totals(read_records(run_dir))
    # The run has ended, whatever its records look like.
    except UserError as unreadable:
        totals, error = _totals(iter(())), error or str(unreadable)
    return merge_summary(run_dir, status=status, error=error or kept, **totals)


def _totals(records: Iterator[dict[str, float]]) -> dict[str, Any]:
    steps, tokens, skipped = 0, 0.0, 0.0
    rewards: list[float] = []
    seconds: dict[str, float] = {}
    for record in records:
        steps = int(record["step"])
        tokens += record.get("num_tokens", 0)
        skipped += record.get("skipped_updates", 0)
        if "reward" in record:
            rewards.append(record["reward"])
        for phase in (key for key in record if key.startswith("time/")):
            seconds[phase[5:]] = seconds.get(phase[5:], 0) + record[phase]
    tenth = max(1, len(rewards) // 10)
    return {
        "steps": steps,
        "reward": {"first_tenth": _mean(rewards[:tenth]), "last_tenth": _mean(rewards[-tenth:])},
        "tokens": int(tokens),
        "skipped_updates": int(skipped),
        "seconds": dict(sorted(seconds.items())),
    }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def is_finished(run_dir: Path, export: bool) -> bool:
    """Has the run in this directory come to its end, with a model where it exports one?"""
    return read_summary(run_dir).get("status") == "completed" and (not export or (run_dir / "model").is_dir())


def adopt_order(run_dir: Path) -> None:
    """From here on the job of a resumed run is the one in job.json: training goes on.

    Until then the run's own record stays as it is: a resume may be refused, or find nothing left to do.
    """
    for new, name in ORDERS.items():
        if (run_dir / new).is_file():
            # In place: whoever holds the lock on job.json holds the file.
            with (run_dir / name).open("r+" if (run_dir / name).exists() else "w", encoding="utf-8") as file:
                file.write((run_dir / new).read_text(encoding="utf-8"))
                file.truncate()
            (run_dir / new).unlink()


def drop_order(run_dir: Path) -> bool:
    """Forget a resume that did not go on; was there one?"""
    waiting = [run_dir / new for new in ORDERS if (run_dir / new).exists()]
    for path in waiting:
        path.unlink()
    return bool(waiting)


def reserve_room(run_dir: Path) -> None:
    """Keep the room that the last words of the run need."""
    path = run_dir / "logs" / "reserve"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"\1" * RESERVE)


def free_room(run_dir: Path) -> None:
    """Remove what is half-written, and the reserve."""
    for pattern in HALVES:
        for path in run_dir.glob(pattern):
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[TextIO]:
    """Replace a file in one step: a reader, or a crash, sees the old text or the new."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
