"""A tiny model of every architecture: the same layer classes, thin and shallow.

The start-up probe of packing runs on one, and so do the tables over all architectures. A config is shrunk by the
names of its fields, which keep to a few habits in transformers; what breaks the habits is in `SPECIAL`.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from posttrain.models.internals import from_config
from posttrain.models.packed.layers import mixers
from posttrain.models.thresholds import lowered

# Decay 0.991 a token: a state outlives every document here. It is written loudly (dt 1.3), and nothing passes it by.
SLOW_DECAY = {"A_log": -5.0, "dt_bias": 1.0, "dt_proj.bias": 1.0, "D": 0.0}

# Whole numbers by name, and the most they may be. The first match counts.
LIMITS = {
    r"n_group|topk_group|num_expert_group|\w*n(um)?_shared_experts": 1,
    r".*vocab.*|n_words": 64,
    r".*(intermediate|ffn_hidden|feed_forward|latent)_size.*|.*ffn_dim|dim_ff|n_inner|d_inner|dff": 64,
    r".*_rank|.*lowrank": 32,
    r".*window(_size)?|attention_chunk_size|local_attention": 32,  # less than the probe's longest document
    r".*coder_layers|num_blocks|num_layers_per_stack|decoder_sparse_step|.*_layer_period": 2,
    r".*_layer_offset": 1,
    r".*num_attention_heads.*|.*coder_attention_heads|index\w*_n_heads|linear_num(_key)?_heads|n_heads": 2,
}
EXPERTS = r".*experts|.*experts_per_tok(en)?|moe_top_?k|moe_k"
WIDTHS = r".*hidden_size.*|lru_width|.*(proj|embed|embedding)_(dim|size)"  # they keep their ratio to the hidden size
KEY_VALUE_HEADS = r".*num_key_value_heads|num_kv_heads|kv_n_heads|num_query_groups"
INITIALIZERS = ("initializer_range", "init_std", "embed_init_std", "initializer_factor")
DENSE_FIRST = r"first_k_dense_replace|num_dense_layers|moe_layer_start_index"  # so many layers without experts

# What the habits get wrong in a tiny config.
SPECIAL: dict[str, dict[str, Any]] = {
    "blenderbot": {"max_position_embeddings": 512},  # the probe's row is longer than 128
    "codegen": {"n_head": 4, "n_embd": 256},  # its projection is split in four
    "longcat_flash": {"zero_expert_num": 4, "moe_topk": 8},  # they too take every token
    "prophetnet": {"pad_token_id": 1},
    "recurrent_gemma": {"num_hidden_layers": 3, "w_init_variance_scale": 1.0},  # its pattern is of three
    "reformer": {"axial_pos_embds": False, "pad_token_id": 1},
    "xlm": {"pad_token_id": 1},
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},  # they are tied
}


def tiny_copy(
    model: PreTrainedModel, device: torch.device, dtype: torch.dtype, crossing: bool = False
) -> PreTrainedModel | None:
    """A model of the same layer classes: thin, shallow, random, slow to forget. None if it cannot be had.

    `crossing`: with the thresholds of its config below the lengths of the probes, see thresholds.py.
    """
    text = model.config.get_text_config(decoder=True)
    build: Callable[..., Any] = type(model) if text is model.config else from_config
    try:
        config = shrunk(text)
        with torch.device(device):
            small = build(lowered(config) if crossing else config).to(dtype)
    # A checkpoint's own code may keep other rules: the model itself is probed then.
    except Exception:
        return None
    same = {type(layer) for layer in mixers(small)} == {type(layer) for layer in mixers(model)}
    return slow_to_forget(small) if same else None


def slow_to_forget(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, whose states outlive a document."""
    for name, parameter in model.named_parameters():
        for suffix, value in SLOW_DECAY.items():
            if name.endswith(f".{suffix}"):
                nn.init.constant_(parameter, value)
    return model


def shrunk(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same architecture with the same head widths and head grouping, and little of everything else."""
    config = copy.deepcopy(config)
    overrides = _take_overrides(config)
    keep = _keep_a_layer_of_each_kind(config, overrides)
    common = {own: name for name, own in config.attribute_map.items()}
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    named = {common.get(name, name): value for name, value in fields.items()}
    exact = _exact(named)
    for name, value in fields.items():
        if name.endswith("token_id") and value is not None:
            _drop_token_id(config, name)
        elif isinstance(value, PreTrainedConfig):
            part = shrunk(value)
            if "hidden_size" in exact and getattr(value, "hidden_size", None) == named["hidden_size"]:
                part.hidden_size = exact["hidden_size"]
            setattr(config, name, part)
        elif (small := _small(common.get(name, name), value, named, exact)) != value:
            setattr(config, name, small)
    for name, value in SPECIAL.get(config.model_type, {}).items():
        setattr(config, name, value)
    if overrides:
        config.per_layer_config = {
            new: {name: _small(name, value, named | overrides[old], exact) for name, value in overrides[old].items()}
            for new, old in enumerate(keep)
            if old in overrides
        }
    return config


def _exact(named: dict) -> dict[str, float]:
    """The sizes that depend on one another. `named`: the fields by their common names."""
    heads, was = named.get("num_attention_heads") or 1, named.get("hidden_size")
    if not was:
        return {}
    # Grouped experts multiply rows of whole 16 bytes.
    width = named.get("head_dim") or -(-was // heads // 8) * 8
    # a layer may take its heads to fill the hidden size; heads this wide never do, and 64 is cheaper
    free = named.get("head_dim") and (was // heads != width or width > 128)
    hidden = 64 if free or heads == 1 else 2 * width
    if named.get("head_dim") and (around := named.get("attention_hidden_size")):
        # Attention reads and writes as much as its heads hold (zamba2).
        hidden = 2 * width * was // around
    # 0.1 at a width of 64, where at the usual 0.02 a layer would drown in the residual stream
    exact = {"hidden_size": hidden} | dict.fromkeys(INITIALIZERS, 0.8 * hidden**-0.5)
    if named.get("head_dim", width) is None:
        exact["head_dim"] = width
    if key_heads := named.get("linear_num_key_heads"):
        exact["linear_num_value_heads"] = 2 * named["linear_num_value_heads"] // key_heads
    exact |= {
        name: max(value * hidden // was, 1)
        for name, value in named.items()
        if type(value) is int and name != "hidden_size" and re.fullmatch(WIDTHS, name)
    }
    return exact | _state_heads(named, hidden)


def _state_heads(named: dict, hidden: int) -> dict[str, int]:
    """Heads of a state space layer: they keep their width where they can, and fill the expanded hidden size."""
    groups_name = next((name for name in ("mamba_n_groups", "mamba_ngroups", "n_groups") if name in named), None)
    for heads_name, width_name in (
        ("mamba_n_heads", "mamba_d_head"),
        ("mamba_num_heads", "mamba_head_dim"),
        ("n_mamba_heads", "mamba_headdim"),
        ("num_heads", "head_dim"),
    ):
        width, expand = named.get(width_name), named.get("mamba_expand") or named.get("expand") or 1
        if groups_name is None or not named.get(heads_name) or not width:
            continue
        groups = min(named[groups_name], 2)
        if heads_name == "mamba_num_heads" or named.get("mamba_d_ssm"):
            return {heads_name: 2, groups_name: groups, "mamba_d_ssm": 2 * width}
        width = math.gcd(width, int(expand * hidden))
        heads = int(expand * hidden) // width
        return {heads_name: heads, width_name: width, groups_name: min(groups, heads)}
    return {}


def _small(name: str, value: Any, named: dict, exact: dict) -> Any:
    """The tiny value of a field, or of each entry of a list; the value itself if it is no size."""
    if isinstance(value, list) and value and all(type(entry) is int for entry in value):
        return [_small(name, entry, named, exact) for entry in value]
    if name in exact:
        return exact[name]
    if name == "num_key_value_heads" and value is None:
        return 2
    if type(value) is not int:
        return value
    if re.fullmatch(EXPERTS, name) and "shared" not in name:
        # All experts take every token: a tie in the router would look like a leak.
        return 4 if value else 0
    if re.fullmatch(KEY_VALUE_HEADS, name):
        heads = (
            named.get(name.replace("key_value", "attention"))
            or named.get("num_attention_heads")
            or named.get("n_heads", 0)
        )
        return 1 if value < heads else 2
    if name in ("max_position_embeddings", "n_positions", "n_ctx"):
        # The probe's row has to fit.
        return max(value, 256)
    limits = (limit for pattern, limit in LIMITS.items() if re.fullmatch(pattern, name))
    return min(value, next(limits, value))


def _drop_token_id(config: PreTrainedConfig, name: str) -> None:
    """No special tokens; where the config insists on one, or counts positions from it, one of the vocabulary."""
    if name == "pad_token_id" and hasattr(config, "type_vocab_size"):
        return setattr(config, name, 1)
    try:
        setattr(config, name, None)
    except StrictDataclassFieldValidationError:
        setattr(config, name, 1)


def _take_overrides(config: PreTrainedConfig) -> dict[int, dict]:
    """Take the fields that single layers have for themselves out of the config: {layer: {name: value}}."""
    if not getattr(config, "is_heterogeneous", False):
        return {}
    overrides = {int(layer): fields for layer, fields in config.to_dict()["per_layer_config"].items()}
    config.per_layer_config = None
    return overrides


def _keep_a_layer_of_each_kind(config: PreTrainedConfig, overrides: dict) -> list[int]:
    """Shorten the stack to the first layer of each kind, and every field that has an entry a layer; the layers kept."""
    layers = getattr(config, "num_hidden_layers", None)
    if not layers:
        return []
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    # Lists of layer numbers.
    numbers = {
        name: value
        for name, value in fields.items()
        if isinstance(value, list)
        and re.search("layer|idx|ids|indices", name)
        and all(type(i) is int and 0 <= i < layers for i in value)
        and value == sorted(set(value))
    }
    entries = {
        name: value
        for name, value in fields.items()
        if isinstance(value, (list, tuple))
        and len(value) == layers
        and name not in numbers
        and "multiplier" not in name
    }
    dense = {name: value for name, value in fields.items() if value and re.fullmatch(DENSE_FIRST, name)}
    unshared = layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    kinds: dict[str, int] = {}
    for i in range(layers):
        kind = [v[i] for v in entries.values()], [i in v for v in numbers.values()], [i < v for v in dense.values()]
        kinds.setdefault(repr((kind, i < unshared, overrides.get(i))), i)
    keep = list(kinds.values()) if len(kinds) > 1 else list(range(min(layers, 2)))
    for name, value in entries.items():
        setattr(config, name, type(value)(value[i] for i in keep))
    for name, value in numbers.items():
        setattr(config, name, [new for new, old in enumerate(keep) if old in value])
    for name, value in dense.items():
        setattr(config, name, sum(i < value for i in keep))
    if unshared < layers:
        config.num_kv_shared_layers = sum(i >= unshared for i in keep)
    if layers != len(keep) and "num_decoder_layers" not in fields:
        config.num_hidden_layers = len(keep)
    return keep
