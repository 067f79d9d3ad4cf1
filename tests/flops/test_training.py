"""What an update costs: three forward passes, less where weights are frozen, more under activation checkpointing."""

import pytest
import torch
from flop_cases import TOKENS, build, counted, counters_excess, trainable
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from posttrain.flops import size
from posttrain.models.architectures import tiny

PARTS = ["later layers", "norms", "one mlp", "head", "nothing"]
CASES = [("llama", part) for part in PARTS] + [("qwen3_moe", part) for part in PARTS if part != "one mlp"]


@pytest.mark.parametrize("family, part", CASES)
def test_frozen_weights_are_billed_for_what_passes_through_them(family, part):
    model = trainable(part, build(family, tie_word_embeddings=False))
    # The core's backward pass runs where a gradient reaches it: the masked pairs count as the useful ones do.
    layers = {"later layers": 3, "norms": 4, "one mlp": 1, "head": 0, "nothing": 0}[part]
    per_layer = counters_excess(model.config, TOKENS) / 4
    expected = counted(model, backward=part != "nothing") - per_layer * (4 + 2 * layers)
    assert size(model).training([TOKENS], TOKENS) == expected


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
def test_training_is_three_forward_passes(family):
    # The counter is wrong about the backward pass of a depthwise convolution: there is no comparing with it.
    counter = size(build(family))
    assert counter.training([9, 30], 12) == 3 * counter.forward([9, 30], 12)


@pytest.mark.parametrize("model_type", ["kimi_linear", "mamba2", "mamba", "falcon_h1", "lfm2", "dbrx", "bert"])
def test_training_all_weights_is_three_forward_passes(model_type):
    sized = size(tiny(model_type))
    assert sized.training([9, 30], 12) == 3 * sized.forward([9, 30], 12)


def test_all_but_norms_frozen_is_twice_the_forward_weights():
    counter = size(trainable("norms", build("llama", tie_word_embeddings=False)))
    assert counter.training_cost.per_token == 2 * counter.forward_cost.per_token
    assert counter.training_cost.per_logit == 2 * counter.forward_cost.per_logit


class Adapted(nn.Module):
    """A frozen layer and the low-rank sum beside it."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def adapted(layers):
    model = build("llama", num_hidden_layers=layers).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        layer.mlp.down_proj = Adapted(layer.mlp.down_proj)
    return model


def test_adapters_are_billed_three_times_and_frozen_weights_twice():
    """By one layer more, since the first layer's frozen weights have no gradient to pass on."""
    three, four = adapted(3), adapted(4)
    width = 4 * 24
    frozen = 2 * (2 * 64 * width + 2 * 64 * 2 * 24 + 3 * 64 * 96)
    adapters = 2 * (64 * 4 + 4 * width + 96 * 4 + 4 * 64)
    core = 4 * width * TOKENS * (TOKENS + 1) // 2
    one_layer = size(four).training([TOKENS], TOKENS) - size(three).training([TOKENS], TOKENS)
    assert one_layer == TOKENS * (2 * frozen + 3 * adapters) + 3 * core
    seen = counted(four, backward=True) - counted(three, backward=True)
    assert one_layer == seen - 3 * counters_excess(four.config, TOKENS) / 4
    assert size(four).training_cost.per_logit == 2 * size(four).forward_cost.per_logit


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@pytest.mark.parametrize("part", ["everything", "later layers"])
def test_hardware_counts_the_decoder_layers_again(family, part):
    """Not the embeddings, the head, or a layer that no gradient passes. Early stop would spare a last projection."""
    model = build(family, tie_word_embeddings=False)
    if part != "everything":
        trainable(part, model)
    plain = counted(model, backward=True)
    for n, layer in enumerate(model.model.layers):
        model.model.layers[n] = checkpoint_wrapper(layer)
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        again = counted(model, backward=True) - plain
    sized, layers = size(model), 4 if part == "everything" else 3
    again -= counters_excess(model.config, TOKENS) * layers / 4 if family == "llama" else 0
    recomputed = sized.hardware([TOKENS], TOKENS, True) - sized.training([TOKENS], TOKENS)
    if family == "gpt_oss":
        recomputed = sized.recomputed_cost.dense([TOKENS], TOKENS)
    assert recomputed == again > 0
    assert sized.hardware([TOKENS], TOKENS, False) == sized.training([TOKENS], TOKENS)
    assert sized.recomputed_cost.per_logit == 0
