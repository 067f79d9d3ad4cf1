"""What is known of a run before its first step: for the banner and summary.json. Some of it is proved here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from posttrain import packing
from posttrain.config import GRPOConf, MetricsName, TrainingConf
from posttrain.rollout.probe import prove_sampler
from posttrain.tasks import Task
from posttrain.tasks.references import score_answers
from posttrain.training.policy import Policy

if TYPE_CHECKING:
    from posttrain.metrics.mfu import Meter


def known_facts(policy: Policy, task: Task, cfg: TrainingConf) -> dict[str, Any]:
    """By name, as summary.json has them.

    Raises UserError where the sampler is not right for the model, no answer can be scored, or no prompt leaves room for
    a completion.
    """
    facts: dict[str, Any] = {
        **policy.facts,
        "world_size": dist.get_world_size(),
        "task": {"train": len(task.train), "heldout": len(task.heldout), "dropped": dict(task.dropped)},
        "template": task.template.facts(),
        "optim": {key: getattr(cfg.optim, key) for key in ("lr", "schedule", "warmup_steps")},
        "every": {
            "evaluation": cfg.evaluation.every if cfg.evaluation.prompts else 0,
            "checkpoint": cfg.checkpoint.every,
        },
    }
    if isinstance(cfg, GRPOConf) or cfg.evaluation.prompts:
        facts["sampler"] = prove_sampler(policy, cfg)
    if isinstance(cfg, GRPOConf):
        facts["max_staleness"] = cfg.rollout.max_staleness
        facts["answers"] = score_answers(task, cfg.task).facts()
        room = packing.short_of_room(task.train, cfg.rollout.max_new_tokens, policy.longest)
        facts["packing"] = policy.facts["packing"] | {"warnings": [*policy.facts["packing"]["warnings"], *room]}
    return facts


def meter(policy: Policy, cfg: TrainingConf) -> Meter | None:
    """The MFU meter, None with metrics=none."""
    if cfg.metrics.name is not MetricsName.mfu:
        return None
    # Runs with metrics=none do without the import.
    from posttrain.metrics.mfu import make_meter

    # What is sampled for a later step takes this step's time.
    ahead = isinstance(cfg, GRPOConf) and cfg.rollout.max_staleness > 0
    return make_meter(cfg.metrics, policy.model, policy.device, policy.dtype, dist.get_world_size(), ahead)
