"""A tiny model of the same architecture: the same layer classes, thin and shallow.

The start-up probe runs on one, and so do the tables over all architectures.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from posttrain.models.packed.layers import mixers

SLOW_DECAY = {"A_log": -3.0, "dt_bias": -2.0}  # A 0.05, dt 0.13: the state outlives every document here


def tiny_copy(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> PreTrainedModel | None:
    """A model of the same layer classes: thin, shallow, random, slow to forget. None if it cannot be had."""
    text = model.config.get_text_config(decoder=True)
    build = type(model) if text is model.config else AutoModelForCausalLM.from_config
    try:
        with torch.device(device):
            small = build(_shrunk(text)).to(dtype)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):  # a config of other rules
        return None
    for name, parameter in small.named_parameters():
        if (value := SLOW_DECAY.get(name.rpartition(".")[2])) is not None:
            nn.init.constant_(parameter, value)
    same = {type(layer) for layer in mixers(small)} == {type(layer) for layer in mixers(model)}
    return small if same else None


def _shrunk(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same architecture with the same head widths and head grouping, and little of everything else."""
    config = copy.deepcopy(config)
    heads = config.num_attention_heads
    grouped = (getattr(config, "num_key_value_heads", None) or heads) < heads
    layer_types = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    key_heads, value_heads = (getattr(config, f"linear_num_{kind}_heads", None) or 2 for kind in ("key", "value"))
    small = {
        "vocab_size": 64,
        "hidden_size": 64 if getattr(config, "head_dim", None) else 2 * config.hidden_size // heads,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1 if grouped else 2,
        "num_hidden_layers": len(layer_types) or 2,
        "layer_types": layer_types,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2 * value_heads // key_heads,
        # every expert takes every token: a tie in the router, rounded differently, would look like a leak
        **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), 4),
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
        "initializer_range": 0.1,  # at 0.02 a layer this thin would drown in the residual stream
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), None),
    }
    for name, value in small.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    return config
