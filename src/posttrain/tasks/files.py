"""Rows from a local file: JSON lines, CSV or parquet."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrain.config.task import AnswerReward, FileConf
from posttrain.errors import UserError
from posttrain.tasks import rewards
from posttrain.tasks.task import Row


def answer_reward(cfg: FileConf) -> rewards.Reward:
    """The reward that `task.answer_reward` names."""
    return {AnswerReward.exact: rewards.exact, AnswerReward.numeric: rewards.numeric}[cfg.answer_reward]


def split(cfg: FileConf) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows. Raises UserError for a file that cannot be read, or lacks a column."""
    found = rows(_read(cfg.path, "task.path"), cfg)
    if cfg.eval_path is not None:
        return found, rows(_read(cfg.eval_path, "task.eval_path"), cfg)
    # A file of a few rows still trains on half of them.
    heldout = min(cfg.heldout, len(found) // 2)
    return found[: len(found) - heldout], found[len(found) - heldout :]


def rows(records: list[dict[str, Any]], cfg: FileConf) -> list[Row]:
    """The columns that hold prompt and answer. Raises UserError for a row that lacks one."""
    for number, record in enumerate(records, 1):
        for option in ("prompt_column", "answer_column"):
            if getattr(cfg, option) not in record:
                raise UserError(
                    f"task.path={cfg.path} row {number} has no column {getattr(cfg, option)!r}; it has "
                    f"{', '.join(map(str, record))}. Set task.{option}."
                )
    return [Row(str(r[cfg.prompt_column] or ""), str(r[cfg.answer_column])) for r in records]


def _read_json_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def _read_csv(file: Path) -> list[dict[str, Any]]:
    # Values stay text: 007 is not 7.
    with file.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def _read_parquet(file: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(file).to_pylist()


READERS: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json_lines,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _read(path: str, option: str) -> list[dict[str, Any]]:
    reader = READERS.get(Path(path).suffix)
    if reader is None:
        raise UserError(f"{option}={path}: the name must end in {', '.join(READERS)}")
    try:
        records = reader(Path(path))
    except (OSError, ValueError) as error:
        # A missing or torn file; JSON, CSV or parquet that is none.
        raise UserError(f"{option}={path} cannot be read: {str(error).splitlines()[0]}") from error
    if not all(isinstance(record, dict) for record in records):
        raise UserError(f"{option}={path}: each line must be a JSON object with the columns of one row")
    return records
