"""Logprobs and their gradients on two ranks, sharded and not, against full logits and one process: test_logprobs.py."""

import dataclasses

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from logprob_cases import gradients_of, row_of, small

from posttrain import logprobs
from posttrain.config import FSDPConf, OptimConf, Strategy
from posttrain.logprobs import token_logprobs
from posttrain.models.head import find_head
from posttrain.training.fsdp import make_accelerator, sharding
from posttrain.training.optim import make_optimizer

CASES = [
    (dict(model_type="gemma2", final_logit_softcapping=2.5, tie_word_embeddings=True), "full_shard", torch.float32),
    (dict(model_type="granite", logits_scaling=8.0, tie_word_embeddings=False), "full_shard", torch.bfloat16),
    (dict(model_type="qwen3_5_text", tie_word_embeddings=True), "full_shard", torch.bfloat16),
    (dict(model_type="llama", tie_word_embeddings=False), "no_shard", torch.bfloat16),
]


def difference(found, wanted):
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(found, wanted, strict=True))


def check() -> None:
    rank = dist.get_rank()
    logprobs.CHUNK_BYTES = 1
    weights = torch.randn(2, 2, 2, 4, generator=torch.Generator().manual_seed(7))
    for fields, strategy, dtype in CASES:
        AcceleratorState._reset_state(reset_partial_state=True)  # or the second accelerator would be as the first
        GradientState._reset_state()
        alone, model = small(**fields), small(**fields)
        both = [token_logprobs(alone, row_of(seed=r), 0.6, find_head(alone), entropy_gradient=True) for r in range(2)]
        averaged = gradients_of(alone, [value / 2 for each in both for value in each], weights.flatten(0, 1))
        head = find_head(model)
        accelerator = make_accelerator(FSDPConf(strategy=Strategy(strategy)), model, dtype)
        model, _ = accelerator.prepare(model, make_optimizer(model, OptimConf()))
        assert sharding(model) == strategy and head.linear is not None
        values, gradients = [], []
        for way in (head, head, dataclasses.replace(head, linear=None)):
            found = token_logprobs(model, row_of(seed=rank), 0.6, way, entropy_gradient=True)
            values.append(found)
            found = {name.removeprefix("module."): g for name, g in gradients_of(model, found, weights[rank]).items()}
            gradients.append({name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in found.items()})
            with torch.no_grad():
                again, _ = token_logprobs(model, row_of(seed=rank), 0.6, way)
            assert torch.equal(again, values[-1][0])
        first, second, full = values
        assert all(value.dtype == torch.float32 for value in first)
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
        assert difference(first, full) < 1e-5, (fields, difference(first, full))
        exact = dtype is torch.float32
        assert (difference(first, both[rank]) < 1e-6) == exact and difference(first, both[rank]) < 0.05
        for found in gradients[:2]:
            assert found.keys() == averaged.keys()
            assert difference(found.values(), gradients[2].values()) < (1e-4 if exact else 0.05)
            assert not exact or difference(found.values(), averaged.values()) < 1e-5
    dist.barrier()
    print("checked")
