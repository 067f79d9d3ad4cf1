"""Options of the group `task`: where problems come from, and what scores their completions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MISSING: Any = "???"  # OmegaConf's marker: an option of conf/, or the user, must give a value

TaskName = StrEnum("TaskName", "arithmetic gsm8k jsonl")


class AnswerReward(StrEnum):
    exact = "exact"  # the stripped completion equals the answer
    numeric = "numeric"  # the last number of the completion equals the answer's


@dataclass
class TaskConf:
    name: TaskName = MISSING  # where problems come from
    system_prompt: str | None = None  # put before each prompt through the tokenizer's chat template
    max_prompt_tokens: int = 1024  # longer prompts are dropped and counted, never cut
    max_new_tokens: int = 256  # room for an answer; rollout.max_new_tokens follows it
    reward_correct: float = 0.9  # weight of the answer reward
    reward_format: float = 0.1  # weight of the format reward


@dataclass
class ArithmeticConf(TaskConf):
    """Sums of two numbers, made on the fly."""

    max_prompt_tokens: int = 64  # longer prompts are dropped and counted, never cut
    max_new_tokens: int = 8  # room for an answer; rollout.max_new_tokens follows it
    largest: int = 49  # operands are drawn from 0 to this
    seed: int = 0  # fixes the split into training and held-out problems, whatever the run's seed
    heldout: int = 256  # problems that training never shows


@dataclass
class FileConf(TaskConf):
    """Tasks read from files: gsm8k (the hub's openai/gsm8k or a local copy) and jsonl."""

    path: str = MISSING  # a .jsonl, .json, .csv or .parquet file; for gsm8k also a hub dataset
    eval_path: str | None = None  # held-out file; null: the last `heldout` rows of path, or the hub's test split
    heldout: int = 64  # rows at the end of path that training never shows
    prompt_column: str = "prompt"  # column of the prompts
    answer_column: str = "answer"  # column of the answers
    answer_reward: AnswerReward = AnswerReward.exact  # when a completion is right


TASKS = {"arithmetic": ArithmeticConf, "gsm8k": FileConf, "jsonl": FileConf}
