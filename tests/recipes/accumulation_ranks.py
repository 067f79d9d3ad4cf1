"""On real ranks, in fp64: the gradient of one `update` of recipes/grpo.py for the same documents, split differently.

test_algorithms.py runs `write_gradients` on ranks; rank 0 writes {name: gradients} to the file that it is given.
"""

import dataclasses
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from posttrain import packing
from posttrain.advantages import token_weights
from posttrain.command import rank
from posttrain.config import (
    Architecture,
    FSDPConf,
    GRPOConf,
    ModelConf,
    OptimConf,
    PackingConf,
    PackingMode,
    Strategy,
)
from posttrain.config.algorithm import Aggregation, AlgorithmConf
from posttrain.metrics.step import UpdateMetrics
from posttrain.models import gdn_packing
from posttrain.models.head import find_head
from posttrain.models.loading import load
from posttrain.records import Document, MiniBatch, Rollout
from posttrain.training.fsdp import make_accelerator
from posttrain.training.optim import make_optimizer
from posttrain.training.policy import Learner, Policy

ROOT = Path(__file__).parents[2]
LENGTHS = [1, 50, 1, 1, 50, 50, 1, 1]
MASKED = {1, 6}  # documents that do not count


def rollouts() -> list[Rollout]:
    numbers = torch.Generator().manual_seed(0)

    def ids(n):
        return tuple(torch.randint(0, 256, (n,), generator=numbers).tolist())

    return [
        Rollout.one_turn(prompt_ids=ids(3), completion_ids=ids(n), logprobs=(-5.0,) * n, finish_reason="stop", group=g)
        for g, n in enumerate(LENGTHS)
    ]


class KeepsGradients:
    """In place of an optimizer: takes no step, and keeps the gradients that it would take one with."""

    def __init__(self, model, optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def step(self) -> None:
        self.gradients = torch.cat([p.grad.full_tensor().flatten() for p in self.model.parameters()])

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def make_policy() -> Policy:
    """In fp64, which no configuration asks for."""
    model, tokenizer = load(ModelConf(architecture=Architecture.qwen3_5_dense))
    model = model.double()
    gdn_packing.patch(model)
    head, cost, longest = find_head(model), packing.document_cost(model), packing.longest(model)
    accelerator = make_accelerator(FSDPConf(strategy=Strategy.full_shard), model, torch.float64)
    model, optimizer = accelerator.prepare(model, make_optimizer(model, OptimConf()))
    assert isinstance(model, FSDPModule)
    return Policy(
        model=model,
        tokenizer=tokenizer,
        device=accelerator.device,
        dtype=torch.float64,
        head=head,
        end_ids=frozenset({256}),
        pad_id=257,
        vocabulary=264,
        cost=cost,
        longest=longest,
        row_limit=math.inf,
        facts={},
        small=None,
        learner=Learner(
            accelerator=accelerator,
            optimizer=KeepsGradients(model, optimizer),
            packing=PackingConf(mode=PackingMode.thd),
            temperature=0.7,
        ),
    )


def write_gradients(out: str) -> None:
    world, me = dist.get_world_size(), dist.get_rank()
    assert world == int(os.environ["WORLD_SIZE"])
    recipe, policy, found = rank._import(ROOT / "recipes" / "grpo.py"), make_policy(), {}
    for aggregation in Aggregation:
        cfg = GRPOConf(
            algorithm=AlgorithmConf(aggregation=aggregation, entropy_coefficient=0.01),
            optim=OptimConf(max_grad_norm=float("inf")),
        )
        lengths = [0 if n in MASKED else length for n, length in enumerate(LENGTHS)]
        weights = token_weights(lengths, aggregation, 64)
        documents = [
            Document(rollout=r, advantage=(-1.0) ** n * (n + 1), weight=w, index=n)
            for n, (r, w) in enumerate(zip(rollouts(), weights, strict=True))
        ]
        spare = packing.spare(documents[0].rollout)
        for name, budget, chosen in (
            ("8 micro-batches", 1, documents),  # two of them all masked
            ("1 micro-batch", 4096, documents),
            ("uneven ranks", 60, [d for d in documents if d.weight]),
            ("few", 4096, [documents[4]]),  # every other rank has nothing but a spare
        ):
            conf = dataclasses.replace(policy.learner.packing, tokens_per_row=budget)
            packed = packing.pack(chosen, spare, conf, policy.cost, policy.pad_id, policy.device)
            mini_batch = MiniBatch(trained=packed, watched=None, left_out=0, refused=0)
            norm, _ = recipe.update(mini_batch, policy, UpdateMetrics(complete=True, always=True), cfg)
            found[f"{aggregation}, {name}"] = policy.optimizer.gradients
            assert abs(norm - policy.optimizer.gradients.norm()) <= 1e-6 * norm
    if me == 0:
        torch.save(found, out)
    dist.barrier()
