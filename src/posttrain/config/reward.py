"""Options of the group `reward`: what scores a completion, and what becomes of a reward that fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class OnError(StrEnum):
    """What a failure of a reward becomes: an exception, a hang, a value that is no number."""

    drop = "drop"  # the completion counts neither in its group nor in the loss
    zero = "zero"  # the reward is 0
    error = "raise"  # the run ends


@dataclass
class JudgeConf:
    """The reward `judge`: a model behind an OpenAI-compatible endpoint marks a completion."""

    url: str | None = None  # of the API, such as http://127.0.0.1:8000/v1
    model: str | None = None  # its name there
    prompt: str | None = None  # what it is asked, with {prompt}, {completion} and {answer}; null: a standard question
    key_variable: str = "OPENAI_API_KEY"  # environment variable that holds the key; without one none is sent
    attempts: int = 4  # of one question, each after a longer pause
    budget: int | None = None  # questions of the whole run on each rank; beyond it the reward is unscorable
    cache: bool = True  # a question that was asked before is not asked again


@dataclass
class RewardConf:
    weights: dict[str, float] = field(default_factory=dict)  # rewards by name with their weights; {}: the task's own
    python: Any = None  # a function of yours, my_reward.py:score, or a list of them; reward=python:my_reward.py:score
    on_error: OnError = OnError.drop  # what a failed reward becomes
    max_failed: float = 0.5  # a larger share of failed rewards in a step ends the run
    timeout_s: float = 10.0  # of one call of a reward that runs in a process of its own
    workers: int | str = "auto"  # such processes on each rank; auto: its share of the cores
    pattern: str | None = None  # of the reward regex: 1 where this regular expression is found
    schema: str | None = None  # of the reward json_schema: a file with the schema that a completion must fit
    ngram: int = 3  # of the reward repetition: words that are compared together
    judge: JudgeConf = field(default_factory=JudgeConf)
    allow_unsandboxed: bool = False  # run programs that the model wrote without isolation, where there is none
