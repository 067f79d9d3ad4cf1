"""Does the reward know a right answer from a wrong one? Tried on the task's own answers, before any completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.config.task import TableConf, TaskConf
from posttrain.errors import UserError
from posttrain.records import Problem
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

    With the reward "correct", or the first one of a task that names its rewards otherwise. Raises UserError if not one
    answer can be scored.
    """
    reward, _ = task.rewards.get("correct") or next(iter(task.rewards.values()))
    problems = task.train[:TRIED]
    right, unscorable, refused, confused = 0, [], [], []
    for problem in problems:
        values = [(answer, reward(answer, answer, True)) for answer in problem.answers]
        right += any(value == 1 for _, value in values)
        unscorable += [answer for answer, value in values if value is None]
        refused += [answer for answer, value in values if value is not None and value < 1]
    if len(unscorable) == sum(len(problem.answers) for problem in problems):
        option = f"task.answer_reward={cfg.answer_reward}" if isinstance(cfg, TableConf) else f"task={cfg.name}"
        raise UserError(
            f"{option} can score none of the first {len(problems)} answers, such as {unscorable[0]!r}: "
            "type task.answer_reward=exact for answers in words, or another task.answer_column"
        )
    for problem, other in _neighbours(problems):
        for wrong in other.answers:
            if wrong not in problem.answers and any(reward(wrong, a, True) == 1 for a in problem.answers):
                confused.append(f"{wrong} for {problem.answers[0]}")
    return Scores(tried=len(problems), right=right, unscorable=unscorable, refused=refused, confused=confused)


def _neighbours(problems: Sequence[Problem]) -> list[tuple[Problem, Problem]]:
    """Each problem with the next one."""
    return list(zip(problems, [*problems[1:], problems[0]], strict=True))
