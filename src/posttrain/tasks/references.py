"""Does the reward know a right answer from a wrong one? Tried on the task's own answers, before any completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.config.task import TableConf, TaskConf
from posttrain.errors import UserError
from posttrain.records import Problem
from posttrain.rewards.calling import COUNTS, Failure, Value
from posttrain.rewards.scorer import Scorer
from posttrain.tasks.task import Task

TRIED = 64  # problems; a math answer takes 3 to 17 ms
SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """How the task's reward scores its reference answers."""

    tried: int
    right: int  # an answer scored as a completion against itself: must be 1
    unscorable: list[str]  # some of the answers that have no score at all
    refused: list[str]  # some of the answers that score below 1 against themselves
    confused: list[str] = field(default_factory=list)  # "5 for 7": answers of other problems, taken for right

    def facts(self) -> dict[str, Any]:
        """For summary.json."""
        return {"tried": self.tried, "right": self.right, "warnings": self.warnings()}

    def warnings(self) -> list[str]:
        """What is worth a look, a line each."""
        found = []
        for answers, what in (
            (self.unscorable, "cannot be scored, so their completions will not count"),
            (self.refused, "are not right by their own reward: no completion can be"),
            (self.confused, "are right for another problem"),
        ):
            if answers:
                found.append(f"of {self.tried} answers tried, some {what}: {'; '.join(map(repr, answers[:SHOWN]))}")
        return found


def score_answers(task: Task, cfg: TaskConf) -> Scores:
    """Score the first answers of the task as if a model had written them.

    With the reward "correct", or the first one of a task that names its rewards otherwise. A function of the user's own
    may mean anything by its numbers: it is only seen to return some. Raises UserError if no answer can be scored, or
    the function fails on each.
    """
    found = Scores(tried=0, right=0, unscorable=[], refused=[], confused=[])
    for name, scorer in task.rewards.items():
        problems = [problem for problem in task.train if problem.task == name][:TRIED]
        answers = [(problem, answer) for problem in problems for answer in problem.answers or ("",)]
        values = _values(scorer, answers, task)
        failures = [value for value in values if isinstance(value, Failure)]
        if len(failures) == len(values):
            raise UserError(
                f"the reward {scorer.first} fails on each of the first {len(values)} answers, such as "
                f"{answers[0][1]!r}: {failures[0]}"
            )
        if not scorer.judges_answers:
            found = replace(found, tried=found.tried + len(problems))
            continue
        if all(value is None for value in values):
            option = f"task.answer_reward={cfg.answer_reward}" if isinstance(cfg, TableConf) else f"task={cfg.name}"
            raise UserError(
                f"{option} can score none of the first {len(problems)} answers, such as {answers[0][1]!r}: "
                "type task.answer_reward=exact for answers in words, or another task.answer_column"
            )
        wrong = [
            (problem, answer)
            for problem, other in _neighbours(problems)
            for answer in other.answers
            if answer not in problem.answers
        ]
        taken = zip(wrong, _values(scorer, wrong, task), strict=True)
        pairs = list(zip(answers, values, strict=True))
        found = Scores(
            tried=found.tried + len(problems),
            right=found.right + len({problem.index for (problem, _), value in pairs if value == 1}),
            unscorable=found.unscorable + [answer for (_, answer), value in pairs if not isinstance(value, float)],
            refused=found.refused + [a for (_, a), value in pairs if isinstance(value, float) and value < 1],
            confused=found.confused + [f"{a} for {problem.answers[0]}" for (problem, a), value in taken if value == 1],
        )
    return found


def _values(scorer: Scorer, written: Sequence[tuple[Problem, str]], task: Task) -> list[Value]:
    """What the reward says of each problem where a model has written this."""
    groups = [[task.sample_of(problem, text)] for problem, text in written]
    values = [value for (value,) in scorer.of(scorer.first, groups)]
    return [value[COUNTS] if isinstance(value, dict) else value for value in values]


def _neighbours(problems: Sequence[Problem]) -> list[tuple[Problem, Problem]]:
    """Each problem with the next one."""
    return list(zip(problems, [*problems[1:], *problems[:1]], strict=True))
