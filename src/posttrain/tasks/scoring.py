"""From rollouts to groups: each rank scores what it sampled, and then knows all groups of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from posttrain.records import Group, Problem, Rollout
from posttrain.tasks.task import Task
from posttrain.training.fsdp import from_all_ranks

SHOWN = 3  # failures


def score(rollouts: Sequence[Rollout], placed: Mapping[int, Problem], task: Task) -> list[Group]:
    """The groups of a step, see `groups_of_all_ranks`.

    Raises RuntimeError, on all ranks, where too many rewards failed.
    """
    groups = groups_of_all_ranks(rollouts, placed, task)
    _refuse_failures(groups, task.max_failed)
    return groups


def groups_of_all_ranks(rollouts: Sequence[Rollout], placed: Mapping[int, Problem], task: Task) -> list[Group]:
    """The group of each problem with all its rewards, on every rank, in the order of their places. A collective.

    Raises UserError or RuntimeError, on the rank that has the reason, as `Task.score` does.
    """
    scored = task.score([(placed[rollout.group], rollout) for rollout in rollouts])
    groups = {place: Group(problem=problem) for place, problem in placed.items()}
    for rollout, each in from_all_ranks(list(zip(rollouts, scored, strict=True))):
        groups[rollout.group] = groups[rollout.group].with_rollout(rollout, *each)
    return list(groups.values())


def _refuse_failures(groups: Sequence[Group], most: float) -> None:
    """Raises RuntimeError, on all ranks, where a larger share than `most` of the step's rewards failed; shows some."""
    rollouts = sum(len(group.rollouts) for group in groups)
    failed = [(group, failure) for group in groups for failure in group.failed if failure]
    if len(failed) <= most * rollouts:
        return
    shown = "\n".join(
        f"  problem {group.problem.index}, {name}: {why}"
        for group, failure in failed[:SHOWN]
        for name, why in failure.items()
    )
    raise RuntimeError(
        f"the rewards of {len(failed)} of {rollouts} completions failed (reward.max_failed={most:g}):\n{shown}"
    )
