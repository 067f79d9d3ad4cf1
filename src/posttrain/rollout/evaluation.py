"""The held-out evaluation: how often the model is right on problems that training never shows."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict

import torch
import torch.distributed as dist

from posttrain.config import EvaluationConf, JobConf, RolloutConf
from posttrain.errors import UserError
from posttrain.records import Group
from posttrain.rewards import numbers
from posttrain.rewards.text import final_text
from posttrain.rollout.local import generate
from posttrain.rollout.statistics import interval, majority, pass_at_k, powers, wilson
from posttrain.tasks import Task
from posttrain.tasks.scoring import groups_of_all_ranks
from posttrain.training.fsdp import gathered
from posttrain.training.policy import Policy

MOST = 50  # values of evaluation.by, each with metrics of its own


def evaluate(policy: Policy, task: Task, cfg: JobConf) -> dict[str, float]:
    """Sample the first `cfg.evaluation.prompts` held-out problems, over all ranks, and say how good that is.

    Returns nothing where the task has no held-out problems. See `summary`.
    """
    return summary(sample(policy, task, cfg), task, cfg.evaluation)


def sample(policy: Policy, task: Task, cfg: JobConf) -> list[Group]:
    """`cfg.evaluation.samples` scored completions of each problem, known to all ranks. A collective."""
    problems = dict(enumerate(task.heldout[: cfg.evaluation.prompts]))
    mine = list(problems.items())[dist.get_rank() :: dist.get_world_size()]
    how = {"group_size": cfg.evaluation.samples, "temperature": cfg.evaluation.temperature}
    with gathered(policy.model) as bare:
        rollouts = generate(
            bare,
            mine,
            RolloutConf(**asdict(cfg.rollout) | how),
            key=(1, cfg.seed, 0),
            end_ids=policy.end_ids,
            pad_id=policy.pad_id,
        )
    return groups_of_all_ranks(rollouts, problems, task)


def summary(groups: Sequence[Group], task: Task, cfg: EvaluationConf) -> dict[str, float]:
    """By name; unscorable completions are left out of means, and where nothing could be scored there is no mean.

    eval/reward is weighted, eval/rewards/<name> is not, each with /low and /high, the ends of its 95 % interval over
    problems. A completion is right if the task's first reward gives it 1: eval/pass@k is without bias, eval/maj@k the
    answer that most of all k samples give. eval/<by>/<value>/... are of the problems with this value in their column.
    """
    if not groups:
        return {}
    found = _means(groups) | _shares(groups, task)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    found["eval/mean_length"] = sum(rollout.written_tokens for rollout in rollouts) / len(rollouts)
    found["eval/truncated"] = sum(not rollout.finished for rollout in rollouts) / len(rollouts)
    found["eval/prompts"] = len(groups)
    for value, part in _parts(groups, cfg.by).items():
        of_part = {"reward": _means(part).get("eval/reward", math.nan), "prompts": len(part)}
        of_part |= {name.removeprefix("eval/"): each for name, each in _shares(part, task).items() if "/l" not in name}
        found |= {f"eval/{cfg.by}/{value}/{name}": each for name, each in of_part.items() if "/high" not in name}
    return {name: value for name, value in found.items() if not math.isnan(value)}


def _means(groups: Sequence[Group]) -> dict[str, float]:
    names = list(dict.fromkeys(name for group in groups for name in group.scores))
    scores = [[group.scores.get(name, (math.nan,))[s] for name in names] for group, s in _samples(groups)]
    means = dict(zip(names, torch.tensor(scores, dtype=torch.float64).nanmean(0).tolist(), strict=True))
    found = {"eval/reward": means["total"]}
    found |= {f"eval/rewards/{name}": value for name, value in means.items() if name != "total"}
    by_problem = [_mean(group.scores["total"]) for group in groups]
    ends = interval([mean for mean in by_problem if not math.isnan(mean)])
    return found | dict(zip(("eval/reward/low", "eval/reward/high"), ends, strict=True))


def _samples(groups: Sequence[Group]) -> list[tuple[Group, int]]:
    return [(group, s) for group in groups for s in range(len(group.rollouts))]


def _shares(groups: Sequence[Group], task: Task) -> dict[str, float]:
    """pass@k and maj@k over the problems of which every sample has a score, and the interval of pass@1."""
    right_PS, answers_PS = [], []
    for group in groups:
        scores = group.scores[task.rewards[group.problem.task].first]
        if not any(map(math.isnan, scores)):
            right_PS.append([score == 1 for score in scores])
            answers_PS.append([_answer(task.sample(group.problem, each).completion) for each in group.rollouts])
    if not right_PS:
        return {}
    samples = len(right_PS[0])
    found = {f"eval/pass@{k}": _mean([pass_at_k(samples, sum(each), k) for each in right_PS]) for k in powers(samples)}
    if samples == 1:
        ends = wilson(sum(each[0] for each in right_PS), len(right_PS))
    else:
        low, high = interval([sum(each) / samples for each in right_PS])
        ends = max(low, 0.0), min(high, 1.0)
        voted = [majority(answers, right) for answers, right in zip(answers_PS, right_PS, strict=True)]
        found[f"eval/maj@{samples}"] = _mean(voted)
    return found | dict(zip(("eval/pass@1/low", "eval/pass@1/high"), ends, strict=True))


def _answer(completion: str) -> Hashable:
    """What a completion votes for: its final number, however it is written, or its final words."""
    said = final_text(completion)
    number = numbers.plain(said)
    return said if number is None else number.value


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _parts(groups: Sequence[Group], by: str | None) -> dict[str, list[Group]]:
    """The groups by the value of a column. Raises UserError for a column that is not there, or has too many values."""
    found: dict[str, list[Group]] = {}
    if by is None:
        return found
    for group in groups:
        columns = {"task": group.problem.task, **group.problem.metadata}
        if by not in columns:
            raise UserError(f"evaluation.by={by}: the rows have no such column; they have {', '.join(columns)}")
        found.setdefault(str(columns[by]), []).append(group)
    if len(found) > MOST:
        raise UserError(f"evaluation.by={by}: the column has {len(found)} values, and {MOST} at most can be told apart")
    return found
