"""On real ranks, in fp64: the gradient of one `update` of recipes/grpo.py for the same documents, split differently.

Started by test_algorithms.py with torch.distributed.run; rank 0 writes {name: gradients} to the file it is given.
"""

import functools
import os
import sys

import torch
import torch.distributed as dist
from conftest import ROOT
from torch.distributed.fsdp import FSDPModule

from posttrain import packing
from posttrain.command import rank
from posttrain.advantages import token_weights
from posttrain.config import Architecture, FSDPConf, GRPOConf, ModelConf, OptimConf, PackingConf, PackingMode, Strategy
from posttrain.config.algorithm import Aggregation, KLConf, AlgorithmConf
from posttrain.training.fsdp import make_accelerator
from posttrain.logprobs import find_head, token_logprobs
from posttrain.metrics.step import UpdateMetrics
from posttrain.models import gdn_packing
from posttrain.models.loading import load
from posttrain.training.optim import make_optimizer
from posttrain.records import Rollout

LENGTHS = [1, 50, 1, 1, 50, 50, 1, 1]
MASKED = {1, 6}  # documents that do not count


def rollouts() -> list[Rollout]:
    numbers = torch.Generator().manual_seed(0)

    def ids(n):
        return tuple(torch.randint(0, 256, (n,), generator=numbers).tolist())

    return [
        Rollout(
            prompt_ids=ids(3), completion_ids=ids(n), logprobs=(-5.0,) * n, finish_reason="stop", group=g, answer=""
        )
        for g, n in enumerate(LENGTHS)
    ]


def main(out: str) -> None:
    rank.start_process_group(60)
    torch.set_num_threads(1)
    world, me = dist.get_world_size(), dist.get_rank()
    recipe = rank._import(ROOT / "recipes" / "grpo.py")
    model, _ = load(ModelConf(architecture=Architecture.qwen3_5_dense))
    model = model.double()
    gdn_packing.patch(model)
    head = find_head(model)
    accelerator = make_accelerator(FSDPConf(strategy=Strategy.full_shard), model, torch.float64)
    model, optimizer = accelerator.prepare(model, make_optimizer(model, OptimConf()))
    assert isinstance(model, FSDPModule) and world == int(os.environ["WORLD_SIZE"])
    logprobs_of = functools.partial(token_logprobs, model, temperature=0.7, head=head)
    found = {}

    def keep_gradients(*_):  # in place of the optimizer's step
        nonlocal gradients
        gradients = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
        optimizer.zero_grad()
        return 1.0

    recipe.optim.step, gradients = keep_gradients, None
    for aggregation in Aggregation:
        loss = AlgorithmConf(aggregation=aggregation, entropy_coefficient=0.01, kl=KLConf(coefficient=0.0))
        cfg = GRPOConf(loss=loss)
        lengths = [0 if n in MASKED else length for n, length in enumerate(LENGTHS)]
        weights = token_weights(lengths, aggregation, 64)
        documents = [
            packing.Document(rollout=r, advantage=(-1.0) ** n * (n + 1), weight=w, index=n)
            for n, (r, w) in enumerate(zip(rollouts(), weights, strict=True))
        ]
        spare, cost = packing.spare(documents[0].rollout), packing.document_cost(model)
        for name, budget, chosen in (
            ("8 micro-batches", 1, documents),  # two of them all masked
            ("1 micro-batch", 4096, documents),
            ("uneven ranks", 60, [d for d in documents if d.weight]),
            ("few", 4096, [documents[4]]),  # every other rank has nothing but a spare
        ):
            conf = PackingConf(mode=PackingMode.thd, tokens_per_row=budget)
            plan = packing.plan(chosen, spare, conf, world, cost)
            rows = [packing.build(row, conf, 257, accelerator.device) for row in plan[me]]
            recipe.update(accelerator, model, optimizer, rows, logprobs_of, UpdateMetrics(), cfg)
            found[f"{aggregation}, {name}"] = gradients
    if me == 0:
        torch.save(found, out)
    dist.barrier()
    rank._leave(0)


if __name__ == "__main__":
    main(sys.argv[1])
