"""Small models with slow-decaying states, so that what is left over from another document is loud; and comparisons."""

from __future__ import annotations

import functools

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from posttrain.models.gdn_packing import boundaries, patch

SHAPE = dict(
    vocab_size=97,
    hidden_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_hidden_layers=4,
    initializer_range=0.1,
    pad_token_id=None,
)
DELTA_NET = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
CONFIGS = {
    "qwen3_5": Qwen3_5TextConfig(**SHAPE, **DELTA_NET, intermediate_size=64),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**SHAPE, **DELTA_NET, **EXPERTS),
    "qwen3_next": Qwen3NextConfig(**SHAPE, **DELTA_NET, **EXPERTS, intermediate_size=64),
    "qwen3": Qwen3Config(**SHAPE, intermediate_size=64),
    "llama": LlamaConfig(**SHAPE, intermediate_size=64),
}
HYBRIDS = ["qwen3_5", "qwen3_5_moe", "qwen3_next"]


def build(name, seed=0):
    """A model whose state decays by 0.993 a token (A = 0.05), patched."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIGS[name])
    for key, parameter in model.named_parameters():
        if key.endswith("A_log"):
            torch.nn.init.constant_(parameter, -3.0)
        if key.endswith("dt_bias"):
            torch.nn.init.constant_(parameter, -2.0)
    patch(model)
    return model.eval()


@functools.cache
def built(name):
    """`build(name)`, made once."""
    return build(name)


def tokens(count, seed=0):
    """Of every model's vocabulary, without the special ones of some."""
    return torch.randint(5, 60, (count,), generator=torch.Generator().manual_seed(seed))


def packed(model, ids, lengths, **more):
    return model(input_ids=ids[None], **boundaries(lengths, "cpu"), **more).logits[0]


def alone(model, ids, lengths):
    """Each document in its own ordinary call, with no boundaries at all: upstream's single-sequence path."""
    return torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in ids.split(list(lengths))])


def gradients(model, logits, seed=5):
    """Of a random sum of logits, by parameter; through `backward`, which reentrant checkpointing needs."""
    target = torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    (logits * target).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def difference(found, wanted):
    """The largest, as a part of the largest value."""
    assert found.isfinite().all()
    return float((found - wanted).detach().abs().max() / wanted.detach().abs().max())


def assert_same(actual, expected, tolerance=1e-4):
    assert actual.isfinite().all()
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


def assert_same_gradients(actual, expected):
    """Some are zero but for rounding (queries of one-token documents): measured by the largest of all."""
    assert actual.keys() == expected.keys()
    floor = 0.01 * max(gradient.abs().max() for gradient in expected.values())
    for name, wanted in expected.items():
        assert (actual[name] - wanted).abs().max() <= 1e-4 * max(wanted.abs().max(), floor), name
