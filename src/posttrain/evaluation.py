"""The held-out evaluation: how often the model is right on problems that training never shows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from posttrain.config import JobConf, RolloutConf
from posttrain.data.tasks import Task
from posttrain.fsdp import from_all_ranks, gathered
from posttrain.rollout.local import generate


def evaluate(
    model: torch.nn.Module,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    cfg: JobConf,
    end_ids: Collection[int],
) -> dict[str, float]:
    """One completion of each of the first `cfg.evaluation.prompts` held-out problems, over all ranks.

    Returns eval/reward (weighted), eval/rewards/<name> (each in [0, 1]; eval/rewards/correct is pass@1) and
    eval/prompts; nothing where the task has no held-out problems. Unscorable completions are left out of the means.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    problems = list(enumerate(task.heldout[: cfg.evaluation.prompts]))
    with gathered(model) as bare:
        rollouts = generate(
            bare,
            problems[rank::world],
            RolloutConf(**asdict(cfg.rollout) | {"group_size": 1, "temperature": cfg.evaluation.temperature}),
            key=(1, cfg.seed, 0),
            end_ids=end_ids,
            pad_id=tokenizer.pad_token_id,
        )
    scores = from_all_ranks([task.score(r, tokenizer) for r in rollouts])
    if not scores:
        return {}
    table = torch.tensor([list(score.values()) for score in scores], dtype=torch.float64)
    means = dict(zip(scores[0], table.nanmean(0).tolist(), strict=True))
    named = {f"eval/rewards/{name}": value for name, value in means.items() if name != "total"}
    return {"eval/reward": means["total"], **named, "eval/prompts": len(scores)}
