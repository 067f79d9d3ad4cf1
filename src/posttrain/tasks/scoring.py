"""From rollouts to groups: each rank scores what it sampled, and then knows all groups of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from posttrain.records import Group, Problem, Rollout
from posttrain.tasks.task import Task
from posttrain.training.fsdp import from_all_ranks


def score(rollouts: Sequence[Rollout], placed: Mapping[int, Problem], task: Task) -> list[Group]:
    """The group of each problem with all its rewards, on every rank, in the order of their places. A collective."""
    mine = [(rollout, task.score(placed[rollout.group], rollout)) for rollout in rollouts]
    groups = {place: Group(problem=problem) for place, problem in placed.items()}
    for rollout, scores in from_all_ranks(mine):
        groups[rollout.group] = groups[rollout.group].with_rollout(rollout, scores)
    return list(groups.values())
