"""Any dataset that the library `datasets` loads: from the hub, or from a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttrain.config.task import HubConf, TableConf
from posttrain.errors import UserError
from posttrain.tasks import columns, files
from posttrain.tasks.formats import Unreadable, from_table
from posttrain.tasks.task import Data, Row

MEDIA = ("Image", "Audio", "Video", "Pdf", "Nifti")  # features of `datasets` whose values are files


def hub(cfg: HubConf) -> Data:
    """`task.split` of a dataset to train on, and `task.eval_split` or its last `task.heldout` rows to hold out."""
    if cfg.eval_split == cfg.split:
        raise UserError(f"task.eval_split={cfg.eval_split} is task.split too: held-out rows would be trained on")
    train = rows(load(cfg.path, cfg.split, cfg.config, cfg.revision), f"task.path={cfg.path} split {cfg.split}", cfg)
    if cfg.eval_split is None:
        train, heldout = files.hold_out(train, cfg)
    else:
        loaded = load(cfg.path, cfg.eval_split, cfg.config, cfg.revision, "eval_split")
        heldout = rows(loaded, f"task.path={cfg.path} split {cfg.eval_split}", cfg)
    return Data(train, heldout, {"correct": cfg.answer_reward.value, "format": "finished"})


def load(path: str, split: str, config: str | None, revision: str | None = None, option: str = "split") -> Any:
    """One split, as a Dataset of `datasets`. Raises UserError where it cannot be loaded."""
    # The import takes half a second, and only a run that reads from the hub needs it.
    import datasets

    datasets.disable_progress_bars()
    try:
        if any((Path(path) / name).is_file() for name in files.SAVED):
            return _saved(path, split, option)
        return datasets.load_dataset(path, config, split=split, revision=revision)
    except Exception as error:
        # The readers of its many formats raise many kinds of errors.
        source = "" if Path(path).exists() else " from the hub"
        reason = next(iter(str(error).strip().splitlines()), "").rstrip(".")
        if not isinstance(error, OSError | ValueError | datasets.exceptions.DatasetsError):
            reason = f"{type(error).__name__}: {reason}"
        raise UserError(
            f"task.path={path} could not be loaded{source}: {reason}. Look at task.config={config} and "
            f"task.{option}={split}; files of your own are task=jsonl."
        ) from error


def rows(loaded: Any, source: str, cfg: TableConf) -> list[Row]:
    """Prompts and answers of a Dataset. Raises UserError for a split without rows, and as `columns.rows` does."""
    names = loaded.column_names
    needed = columns.outer(cfg, names)
    if cfg.columns is None:
        # Pictures are no part of a prompt here, and would be gigabytes.
        needed |= {name for name, kind in loaded.features.items() if type(kind).__name__ not in MEDIA}
    chosen = loaded.select_columns(sorted(needed))
    try:
        records = from_table(chosen.with_format("arrow")[:])
    except Unreadable as error:
        raise UserError(f"{source} cannot be read: {error}") from error
    if not records:
        raise UserError(f"{source} holds no row")
    for name, words in _labels(chosen).items():
        for record in records:
            label = record.columns[name]
            # -1 stands for a label that is not known.
            record.columns[name] = words[label] if label is not None and label >= 0 else None
    return columns.rows(records, source, cfg, names)


def _labels(loaded: Any) -> dict[str, list[str]]:
    """The words that the numbers of a column of labels stand for."""
    import datasets

    return {name: kind.names for name, kind in loaded.features.items() if isinstance(kind, datasets.ClassLabel)}


def _saved(path: str, split: str, option: str) -> Any:
    """A split of what save_to_disk wrote; a Dataset alone is the split `train`. Raises ValueError."""
    import datasets

    loaded = datasets.load_from_disk(path)
    splits = loaded if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
    if split not in splits:
        raise ValueError(f"it has no split {split!r}, but {', '.join(splits)}")
    return splits[split]
