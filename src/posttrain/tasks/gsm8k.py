"""Grade school mathematics: openai/gsm8k from the hub, or a local copy of it."""

from __future__ import annotations

from posttrain.config.task import FileConf
from posttrain.errors import UserError
from posttrain.tasks import files, hub
from posttrain.tasks.task import Data


def gsm8k(cfg: FileConf) -> Data:
    """openai/gsm8k from the hub through `datasets`, or local files of the same columns."""
    scorers = {"correct": cfg.answer_reward.value, "format": "marked_format"}
    if files.is_local(cfg.path):
        return Data(*files.split(cfg), scorers)
    if cfg.eval_path is not None:
        raise UserError(
            f"task.eval_path={cfg.eval_path}: {cfg.path} on the hub brings its own test split; leave it out"
        )
    train, test = (
        hub.rows(hub.load(cfg.path, split, "main"), f"task.path={cfg.path} split {split}", cfg)
        for split in ("train", "test")
    )
    return Data(train, test, scorers)
