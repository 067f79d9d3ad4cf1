"""Prompts and answers of the user's own, from a file."""

from __future__ import annotations

from posttrain.config.task import FileConf
from posttrain.tasks import files, rewards
from posttrain.tasks.task import Data


def jsonl(cfg: FileConf) -> Data:
    """A local JSONL, CSV or parquet file; `prompt_column` and `answer_column` name its columns."""
    return Data(*files.split(cfg), {"correct": files.answer_reward(cfg), "format": rewards.finished_format})
