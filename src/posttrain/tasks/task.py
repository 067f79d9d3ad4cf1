"""What a task is: problems to train on, problems to hold out, and the rewards that score their completions."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from posttrain.records import Messages, Problem, Rollout
from posttrain.rewards.calling import Sample
from posttrain.rewards.scorer import Scored, Scorer, Source
from posttrain.tasks.templates import Template


class Row(NamedTuple):
    """One row of a task's data."""

    prompt: str | Messages | None  # None: there is none
    answer: str | tuple[str, ...] | None  # several: any of them is right; None: there is none
    place: str = ""  # where it stands, such as "task.path=a.jsonl line 17"
    columns: Mapping[str, Any] = {}  # what else the row has, for rewards


@dataclass(frozen=True, slots=True)
class Data:
    """What a file of this folder makes of its options: rows, and the rewards that fit them by name."""

    train: list[Row]
    heldout: list[Row]
    rewards: Mapping[str, Source]  # a name of rewards/kinds.py, or a function


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Problems with their rewards, ready for a model."""

    train: Sequence[Problem]
    heldout: Sequence[Problem]
    rewards: Mapping[str, Scorer]  # by the task's name that stands in a problem
    dropped: Mapping[str, int]  # rows left out, by reason, such as {"no answer": 3}
    template: Template
    tokenizer: PreTrainedTokenizerBase

    @property
    def max_failed(self) -> float:
        """The largest share of a step's rewards that may fail."""
        return min(scorer.cfg.max_failed for scorer in self.rewards.values())

    def score(self, answered: Sequence[tuple[Problem, Rollout]]) -> list[Scored]:
        """What each rollout gets. Those of a group stand side by side.

        Raises UserError for a reward that cannot be made, RuntimeError as `reward.on_error` says.
        """
        found: dict[int, Scored] = {}
        places = list(enumerate(answered))
        for name, scorer in self.rewards.items():
            mine = [(place, each) for place, each in places if each[0].task == name]
            groups = [list(group) for _, group in itertools.groupby(mine, key=lambda entry: entry[1][1].group)]
            scored = scorer.score([[self.sample(*each) for _, each in group] for group in groups])
            for group, of_group in zip(groups, scored, strict=True):
                found |= {place: one for (place, _), one in zip(group, of_group, strict=True)}
        return [found[place] for place, _ in places]

    def sample(self, problem: Problem, rollout: Rollout) -> Sample:
        """What rewards are told of a rollout."""
        text = self.tokenizer.decode(list(rollout.written), skip_special_tokens=True)
        # A list of texts comes only from a list of sequences.
        assert isinstance(text, str)
        return _sample(problem, text, rollout.written, rollout.finished)

    def sample_of(self, problem: Problem, text: str) -> Sample:
        """What rewards would be told of a completion of this text, whose turn has ended."""
        return _sample(problem, text, self.tokenizer(text, add_special_tokens=False)["input_ids"], True)


def _sample(problem: Problem, completion: str, completion_ids: Sequence[int], finished: bool) -> Sample:
    return Sample(
        prompt=problem.prompt,
        completion=completion,
        answer=problem.answer,
        finished=finished,
        prompt_ids=problem.prompt_ids,
        completion_ids=completion_ids,
        task=problem.task,
        row=problem.metadata,
    )


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
