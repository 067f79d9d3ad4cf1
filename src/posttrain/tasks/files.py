"""Rows from local files: one, several, a glob, or all of a directory."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

from posttrain.config.task import FileConf, TableConf
from posttrain.errors import UserError
from posttrain.tasks import columns
from posttrain.tasks.formats import READERS, Unreadable, read
from posttrain.tasks.task import Row

ENDINGS = ", ".join(READERS)
SAVED = ("dataset_info.json", "dataset_dict.json")  # what save_to_disk of `datasets` leaves


def split(cfg: FileConf) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows. Raises UserError for files that cannot be read, or lack a column."""
    train = files_of(cfg.path, "task.path")
    if cfg.eval_path is None:
        return hold_out(_rows(train, "task.path", cfg), cfg)
    heldout = files_of(cfg.eval_path, "task.eval_path")
    both = {file.resolve() for file in train} & {file.resolve() for file in heldout}
    if both:
        raise UserError(
            f"task.eval_path names {min(both)}, which task.path names too: held-out rows would be trained on. "
            "Leave task.eval_path out to hold out the last task.heldout rows."
        )
    return _rows(train, "task.path", cfg), _rows(heldout, "task.eval_path", cfg)


def hold_out(found: list[Row], cfg: TableConf) -> tuple[list[Row], list[Row]]:
    """The last `task.heldout` rows apart; of a few rows, at most half of them."""
    heldout = min(cfg.heldout, len(found) // 2)
    return found[: len(found) - heldout], found[len(found) - heldout :]


def is_local(path: Any) -> bool:
    """Does a path mean files, and not a name on the hub?"""
    return not isinstance(path, str) or Path(path).suffix.lower() in READERS or glob.has_magic(path)


def files_of(path: Any, option: str) -> list[Path]:
    """The files that `path` means, in the order of a list, and by name within a glob or a directory.

    Raises UserError where it means none.
    """
    if isinstance(path, str):
        return _matching(path, option)
    if not isinstance(path, list) or not path or not all(isinstance(each, str) for each in path):
        raise UserError(
            f"{option}={path}: must be a file, a glob, a directory, or a list of these such as {option}=[a.jsonl,b.csv]"
        )
    return [file for each in path for file in _matching(each, option)]


def _matching(path: str, option: str) -> list[Path]:
    """Of a name, before that is a glob; files of a directory that have another ending are not rows."""
    here = Path(path)
    if here.is_dir():
        if any((here / name).is_file() for name in SAVED):
            raise UserError(f"{option}={path} was written by save_to_disk: type task=hub task.path={path}")
        found = sorted(file for file in here.iterdir() if file.suffix.lower() in READERS and file.is_file())
        if not found:
            raise UserError(f"{option}={path}: the directory has no file that ends in {ENDINGS}")
        return found
    if glob.has_magic(path) and not here.exists():
        found = sorted(Path(name) for name in glob.glob(path, recursive=True) if Path(name).is_file())
        if not found:
            raise UserError(f"{option}={path}: no file matches")
    else:
        found = [here]
    for file in found:
        if file.suffix.lower() not in READERS:
            raise UserError(f"{option}={file}: the name must end in {ENDINGS}")
        if file.exists() and not file.is_file():
            # To open a pipe waits for whoever writes into it.
            raise UserError(f"{option}={file} is a pipe or a device: write what comes out of it into a file")
    return found


def _rows(files: list[Path], option: str, cfg: TableConf) -> list[Row]:
    found = []
    for file in files:
        source = f"{option}={file}"
        try:
            records = read(file)
        except Unreadable as error:
            raise UserError(f"{source} cannot be read: {error}") from error
        except OSError as error:
            raise UserError(f"{source} cannot be read: {error.strerror or error}") from error
        found += columns.rows(records, source, cfg)
    if not found:
        raise UserError(f"{option}={', '.join(map(str, files))} holds no row")
    return found
