"""What a task is: problems to train on, problems to hold out, and the rewards that score their completions."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from posttrain.records import Messages, Problem, Rollout
from posttrain.tasks.rewards import Reward
from posttrain.tasks.templates import Template


class Row(NamedTuple):
    """One row of a task's data."""

    prompt: str | Messages | None  # None: there is none
    answer: str | tuple[str, ...] | None  # several: any of them is right; None: there is none
    place: str = ""  # where it stands, such as "task.path=a.jsonl line 17"


@dataclass(frozen=True, slots=True)
class Data:
    """What a file of this folder makes of its options: rows, and the rewards that fit them by name."""

    train: list[Row]
    heldout: list[Row]
    rewards: Mapping[str, Reward]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Problems with their rewards, ready for a model."""

    train: Sequence[Problem]
    heldout: Sequence[Problem]
    rewards: dict[str, tuple[Reward, float]]  # name -> (function, weight)
    dropped: Mapping[str, int]  # rows left out, by reason, such as {"no answer": 3}
    template: Template
    tokenizer: PreTrainedTokenizerBase

    def score(self, problem: Problem, rollout: Rollout) -> dict[str, float]:
        """Each reward of one rollout, unweighted, and "total", their weighted sum. NaN: could not be scored.

        Of several answers the one counts that gives the best score.
        """
        text = self.tokenizer.decode(list(rollout.written), skip_special_tokens=True)
        # A list of texts comes only from a list of sequences.
        assert isinstance(text, str)
        scores, total = {}, 0.0
        for name, (reward, weight) in self.rewards.items():
            values = [reward(text, answer, rollout.finished) for answer in problem.answers]
            value = max((each for each in values if each is not None), default=None)
            scores[name] = math.nan if value is None else value
            total += weight * scores[name] if weight else 0.0
        return {**scores, "total": total}


def batch(problems: Sequence[Problem], count: int, step: int, seed: int) -> list[Problem]:
    """The `count` problems of step `step` (from 0): each epoch is a fresh permutation, shown once, none skipped.

    A function of its arguments alone, so a resumed run needs no data state.
    """
    picked, orders = [], {}
    for position in range(step * count, (step + 1) * count):
        epoch, offset = divmod(position, len(problems))
        if epoch not in orders:
            orders[epoch] = random.Random(f"{seed}/{epoch}").sample(range(len(problems)), len(problems))
        picked.append(problems[orders[epoch][offset]])
    return picked


def further(problems: Sequence[Problem], count: int, seen: Sequence[Problem], step: int, seed: int) -> list[Problem]:
    """Up to `count` problems at random, none of `seen`. These draws leave the epochs of `batch` as they are.

    A function of its arguments alone, as `batch` is.
    """
    known = {problem.index for problem in seen}
    left = [problem for problem in problems if problem.index not in known]
    return random.Random(f"{seed}/{step}/{len(seen)}").sample(left, max(0, min(count, len(left))))
