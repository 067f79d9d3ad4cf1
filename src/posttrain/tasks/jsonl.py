"""Prompts and answers of the user's own, from files."""

from __future__ import annotations

from posttrain.config.task import FileConf
from posttrain.tasks import files
from posttrain.tasks.task import Data


def jsonl(cfg: FileConf) -> Data:
    """Local JSONL, JSON, CSV or parquet files; `prompt_column` and `answer_column` name their columns."""
    return Data(*files.split(cfg), {"correct": cfg.answer_reward.value, "format": "finished"})
