"""The checks of the options of `reward`, alone and together with the task. No torch, no Hydra."""

from __future__ import annotations

import math

from posttrain.config import JobConf, SFTConf
from posttrain.config.algorithm_rules import least
from posttrain.config.task import TableConf


def reward_rules(cfg: JobConf) -> list[tuple[bool, str]]:
    """Each rule, and what to say where it does not hold."""
    reward, task, judge = cfg.reward, cfg.task, cfg.reward.judge
    endless = [f"{name}:{weight}" for name, weight in reward.weights.items() if not math.isfinite(weight)]
    workers = reward.workers
    return [
        (not endless, f"reward.weights={{{','.join(endless)}}}: must be finite numbers"),
        (
            reward.python is None or isinstance(reward.python, str) or _texts(reward.python),
            f"reward.python={reward.python}: must be path/to/file.py:function, or a list of these",
        ),
        (0 <= reward.max_failed <= 1, f"reward.max_failed={reward.max_failed}: must be from 0 to 1"),
        (reward.timeout_s > 0, f"reward.timeout_s={reward.timeout_s}: must be above 0"),
        (
            workers == "auto" or (isinstance(workers, int) and not isinstance(workers, bool) and workers >= 1),
            f"reward.workers={workers}: must be auto, or a whole number from 1",
        ),
        least("reward.ngram", reward.ngram, 1),
        least("reward.judge.attempts", judge.attempts, 1),
        *([least("reward.judge.budget", judge.budget, 0)] if judge.budget is not None else []),
        *([_answers(cfg, task)] if isinstance(task, TableConf) else []),
    ]


def _texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value)


def _answers(cfg: JobConf, task: TableConf) -> tuple[bool, str]:
    """What compares with answers needs some."""
    if isinstance(cfg, SFTConf):
        return (
            task.answer_column is not None,
            "task.answer_column=null: recipes/sft.py learns answers; name their column",
        )
    compared = "correct" in cfg.reward.weights or not (cfg.reward.weights or cfg.reward.python)
    return (
        task.answer_column is not None or not compared,
        "task.answer_column=null: the task's own reward compares with answers; name their column, or type "
        "reward=python:my_reward.py:score",
    )
