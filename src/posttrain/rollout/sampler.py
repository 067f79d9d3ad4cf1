"""Where completions come from: each sampler has three methods, and the loop of recipes/grpo.py calls nothing else.

    submit(problems, step)   consumes the problems of a step by their places; produces a ticket; waits for nothing but a
                             sampler that works in this process; unblocked by a free place among the steps ahead
    collect(ticket)          consumes a ticket; produces this rank's share of the rollouts, samples of a group side by
                             side; waits for its own rollouts; unblocked by the last of them, on every rank
    publish(version)         consumes the policy's weights as they are now; produces nothing; waits until the sampler
                             has them; unblocked by the optimizer step before it

All ranks call all three, in the same order: each may hold a collective.
`rollout.max_staleness` bounds how many steps are submitted before they are collected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist

from posttrain.config import GRPOConf
from posttrain.records import Problem, Rollout
from posttrain.rollout.local import generate
from posttrain.training.fsdp import gathered
from posttrain.training.policy import Policy

Placed = Mapping[int, Problem]  # by the place in the step


def steps_to_ask_for(step: int, cfg: GRPOConf) -> int:
    """From this step on: itself and up to rollout.max_staleness more, but none beyond the next checkpoint.

    A run that resumes there asks for the same steps with the same weights.
    """
    every = cfg.checkpoint.every
    end = min(cfg.steps, (step // every + 1) * every) if every else cfg.steps
    return min(1 + cfg.rollout.max_staleness, end - step)


class Sampler(Protocol):
    def submit(self, problems: Placed, step: int) -> Any: ...

    def collect(self, ticket: Any) -> list[Rollout]: ...

    def publish(self, version: int) -> None: ...


@dataclass(slots=True)
class Local:
    """The training model itself samples, at once when it is asked: it holds the newest weights anyway.

    With `rollout.max_staleness=n` the rollouts of a step are therefore of weights up to n steps before it.
    """

    policy: Policy
    cfg: GRPOConf
    version: int  # of the weights

    def submit(self, problems: Placed, step: int) -> list[Rollout]:
        mine = list(problems.items())[dist.get_rank() :: dist.get_world_size()]
        with gathered(self.policy.model) as bare:
            return generate(
                bare,
                mine,
                self.cfg.rollout,
                key=(0, self.cfg.seed, step),
                end_ids=self.policy.end_ids,
                pad_id=self.policy.pad_id,
                version=self.version,
            )

    def collect(self, ticket: list[Rollout]) -> list[Rollout]:
        # The phase ends for all ranks when the slowest one has sampled its share.
        dist.barrier()
        return ticket

    def publish(self, version: int) -> None:
        self.version = version


# By rollout.name: (policy, options, version of the policy's weights) -> sampler.
SAMPLERS: dict[str, Callable[[Policy, GRPOConf, int], Sampler]] = {"local": Local}
