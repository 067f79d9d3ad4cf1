"""Options of the group `task`: where problems come from, and what scores their completions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MISSING: Any = "???"  # OmegaConf's marker: an option of conf/, or the user, must give a value

TaskName = StrEnum("TaskName", "arithmetic gsm8k jsonl hub")


class SystemRole(StrEnum):
    system = "system"  # a turn of its own
    user = "user"  # at the head of the first user turn


class AnswerReward(StrEnum):
    exact = "exact"  # the stripped completion equals the answer
    numeric = "numeric"  # the completion's final number equals the answer's, exactly
    math = "math"  # the same for plain numbers; anything else is compared as mathematics


@dataclass
class TaskConf:
    name: TaskName = MISSING  # where problems come from
    system_prompt: str | None = None  # put before each prompt through the tokenizer's chat template
    system_role: SystemRole = SystemRole.system  # where the system prompt goes; user: for templates that drop it
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
class TableConf(TaskConf):
    """Tasks that are read from tables: a row a prompt."""

    heldout: int = 64  # rows at the end that training never shows, where no others are named
    prompt_column: str = "prompt"  # column of the prompts, text or chat messages; a.b: field b of column a
    answer_column: str | None = "answer"  # column of the answers; a list means any of; a.b as above; null: none
    columns: list[str] | None = None  # others that rewards are told of; null: all, but for pictures, sound and films
    answer_reward: AnswerReward = AnswerReward.exact  # when a completion is right


@dataclass
class FileConf(TableConf):
    """Tasks read from files: gsm8k (the hub's openai/gsm8k or a local copy) and jsonl."""

    path: Any = MISSING  # a .jsonl, .json, .csv or .parquet file, a glob, a directory or a list; gsm8k: or a hub name
    eval_path: Any = None  # held-out files; null: the last `heldout` rows of path, or the hub's test split


@dataclass
class HubConf(TableConf):
    """Any dataset that the library `datasets` loads: from the hub, or from a directory."""

    path: str = MISSING  # a dataset of the hub, or a directory that save_to_disk or load_dataset knows
    config: str | None = None  # the dataset's configuration (subset); null: its only one
    split: str = "train"  # rows to train on; train[:1000] is the first thousand
    eval_split: str | None = None  # held-out rows; null: the last `heldout` rows of split
    revision: str | None = None  # commit, branch or tag on the hub; null: the newest


TASKS = {"arithmetic": ArithmeticConf, "gsm8k": FileConf, "jsonl": FileConf, "hub": HubConf}
