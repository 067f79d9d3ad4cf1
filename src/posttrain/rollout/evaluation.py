"""The held-out evaluation: how often the model is right on problems that training never shows."""

from __future__ import annotations

import math
from dataclasses import asdict

import torch
import torch.distributed as dist

from posttrain.config import JobConf, RolloutConf
from posttrain.rollout.local import generate
from posttrain.tasks import Task
from posttrain.training.fsdp import from_all_ranks, gathered
from posttrain.training.policy import Policy


def evaluate(policy: Policy, task: Task, cfg: JobConf) -> dict[str, float]:
    """One completion of each of the first `cfg.evaluation.prompts` held-out problems, over all ranks.

    Returns eval/reward (weighted), eval/rewards/<name> (each in [0, 1]; eval/rewards/correct is pass@1) and
    eval/prompts; nothing where the task has no held-out problems. Unscorable completions are left out of the means.
    """
    problems = task.heldout[: cfg.evaluation.prompts]
    mine = list(enumerate(problems))[dist.get_rank() :: dist.get_world_size()]
    one_each = {"group_size": 1, "temperature": cfg.evaluation.temperature}
    with gathered(policy.model) as bare:
        rollouts = generate(
            bare,
            mine,
            RolloutConf(**asdict(cfg.rollout) | one_each),
            key=(1, cfg.seed, 0),
            end_ids=policy.end_ids,
            pad_id=policy.pad_id,
        )
    scored = from_all_ranks(task.score([(problems[r.group], r) for r in rollouts]))
    if not scored:
        return {}
    names = list(dict.fromkeys(name for each in scored for name in each.scores))
    table = torch.tensor([[each.scores.get(name, math.nan) for name in names] for each in scored], dtype=torch.float64)
    means = dict(zip(names, table.nanmean(0).tolist(), strict=True))
    named = {f"eval/rewards/{name}": value for name, value in means.items() if name != "total"}
    found = {"eval/reward": means["total"], **named, "eval/prompts": len(scored)}
    # Where nothing could be scored there is no mean.
    return {name: value for name, value in found.items() if not math.isnan(value)}
