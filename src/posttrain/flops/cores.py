"""How the layers of a model mix their tokens: attention, delta rules, state spaces, short convolutions.

A core multiplies activations with activations, so no weight tells its size; the module's own attributes do. Each
kind counted here was compared with a FLOP counter on the running layer (`python -m posttrain.models.survey flops`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from posttrain.flops.cost import Chunk, Span, Unit

OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "dense", "c_proj", "Wo")
VALUE_PROJECTIONS = ("value", "v_proj")  # where the output projection is another module's, as in BERT

# Softmax attention that does not say so itself with `is_causal`.
ATTENTION = {
    *("BloomAttention", "CodeGenAttention", "GPTNeoXJapaneseAttention", "GitSelfAttention"),
    *("MegatronBertSelfAttention", "MptAttention", "MvpAttention", "RemBertSelfAttention", "RoFormerSelfAttention"),
    *("TrOCRAttention", "XGLMAttention", "BigBirdPegasusDecoderAttention"),
}
GATED_DELTA_RULE = ("A_log", "dt_bias", "num_v_heads", "head_k_dim", "head_v_dim")
STATE_SPACE_HEADS = ("A_log", "dt_bias", "num_heads", "head_dim", "ssm_state_size")  # Mamba-2
SELECTIVE_SCAN = ("A_log", "x_proj", "dt_proj", "intermediate_size", "ssm_state_size")  # Mamba-1


@dataclass(frozen=True, slots=True)
class Core:
    """What a mixer multiplies beside its weights: `flops` for each `unit`."""

    kind: str  # the part that it and the layers around it belong to
    unit: Unit
    flops: float


def find_core(name: str, module: nn.Module, config: PreTrainedConfig) -> Core | None:
    """The core of this module; None if it is no mixer that is known. Raises ValueError for attention it misreads."""
    if getattr(module, "is_causal", None) is True or type(module).__name__ in ATTENTION:
        return Core("attention", ("pair", _span(name, module, config)), _pair_flops(name, module))
    # Each head reads, writes and queries its state for each token: dk x dv three times.
    if _has(module, GATED_DELTA_RULE):
        return Core("delta-rule", "token", 6 * _product(module, "num_v_heads", "head_k_dim", "head_v_dim"))
    if hasattr(module, "forget_gate") and _has(module, ("qkv_dim", "num_heads", "head_dim", "conv1d")):
        # of Kimi: a gate per channel
        return Core("delta-rule", "token", 6 * _product(module, "num_heads", "head_dim", "head_dim"))
    # Each head writes and queries its state for each token: P x N twice.
    if _has(module, STATE_SPACE_HEADS):
        return Core("state-space", "token", 4 * _product(module, "num_heads", "head_dim", "ssm_state_size"))
    # Here each channel has a state of its own.
    if _has(module, SELECTIVE_SCAN):
        return Core("state-space", "token", 4 * _product(module, "intermediate_size", "ssm_state_size"))
    if type(module).__name__.endswith("ShortConv") and _has(module, ("in_proj", "conv", "out_proj")):
        # The convolution is all that the layer multiplies.
        return Core("convolution", "token", 0)
    return None


def check_layers(layers: dict[str, nn.Module], cores: dict[str, Core]) -> None:
    """Raise ValueError unless each decoder layer mixes its tokens in one known way, or in two of different kinds."""
    for name, layer in layers.items():
        kinds = [core.kind for at, core in cores.items() if f"{at}.".startswith(f"{name}.")]
        # The layer is nothing but an MLP, and says so.
        if not kinds and getattr(layer, "block_type", None) in ("mlp", "moe"):
            continue
        inside = ", ".join(_class(child) for child in layer.children() if any(True for _ in child.children()))
        if not kinds:
            raise ValueError(f"{name}: no way to mix tokens that is known in {_class(layer)} ({inside})")
        if len(kinds) != len(set(kinds)):
            raise ValueError(f"{name}: {_class(layer)} ({inside}) mixes tokens by {' and '.join(kinds)}")


def refused(root: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(name, module, reason) of each module that a walk is known to count wrongly."""
    for name, module in root.named_modules():
        if any("indexer" in key for key, _ in module.named_children()):
            yield name, module, "chooses its keys, which is not counted"
        if getattr(module, "is_kv_shared_layer", False):
            yield name, module, "shares its keys, which is not counted"
        if isinstance(module, nn.ModuleDict) and len(module) > 1:
            yield name, module, f"chooses one of {list(module)}, which is not counted"
        if any("adapter_list" in key for key, _ in module.named_children()):
            yield name, module, "takes other weights in each layer, which is not counted"
        if type(module).__name__ == "PhimoeSparseMoeBlock" and module.top_k != 2:
            yield name, module, f"takes two experts, whatever its top_k of {module.top_k} says"


def _has(module: nn.Module, attributes: tuple[str, ...]) -> bool:
    return all(hasattr(module, name) for name in attributes)


def attribute(module: nn.Module, name: str) -> Any:
    """Of any kind; to torch's annotations every attribute of a module is a tensor or a module."""
    return getattr(module, name)


def _product(module: nn.Module, *sizes: str) -> int:
    return math.prod(attribute(module, name) for name in sizes)


def _pair_flops(name: str, attention: nn.Module) -> float:
    """q.k and p.v of one query-key pair over all heads, 2 H (dk + dv); the output projection tells H dv."""
    own = [key for key, _ in attention.named_parameters(recurse=False) if "sink" not in key and "bias" not in key]
    if own:
        raise ValueError(f"{name}: {_class(attention)} has a {own[0]} of its own: not the usual attention")
    width = _output_width(attention)
    if width is None:
        raise ValueError(f"{name}: {_class(attention)} has no output projection of a known name and kind")
    key_width = getattr(attention, "qk_head_dim", getattr(attention, "head_dim", 1))
    return 2 * width * (1 + key_width / getattr(attention, "v_head_dim", key_width))


def _output_width(attention: nn.Module) -> int | None:
    """Channels of all heads' values."""
    for key, child in attention.named_children():
        if key in OUTPUT_PROJECTIONS:
            return child.weight.shape[0] if isinstance(child, Conv1D) else getattr(child, "in_features", None)
    children = dict(attention.named_children())
    alone = hasattr(attention, "all_head_size") and next((key for key in VALUE_PROJECTIONS if key in children), None)
    return attribute(children[alone], "out_features") if alone else None


def _span(name: str, attention: nn.Module, config: PreTrainedConfig) -> Span:
    """The sliding window or chunk of a layer; None where a query sees everything before it."""
    kinds = getattr(config, "layer_types", None)
    index = getattr(attention, "layer_idx", None)
    kind = kinds[index] if kinds and index is not None else None
    if kind == "chunked_attention":
        return Chunk(config.attention_chunk_size)
    # gpt_neo says so in this way.
    if getattr(attention, "attention_type", None) == "local":
        return config.window_size
    if kind in ("full_attention", "attention"):
        return None
    if kind not in (None, "sliding_attention", "hybrid"):
        raise ValueError(f"{name}: {_class(attention)} is attention of the kind {kind!r}, which is not counted")
    if hasattr(attention, "sliding_window"):
        return attribute(attention, "sliding_window")
    # The model masks for all its layers. A config may have a window that the model makes no mask of.
    file = next(base.__module__ for base in type(attention).__mro__ if "forward" in vars(base))
    masks = kind is not None or hasattr(sys.modules[file], "create_sliding_window_causal_mask")
    return getattr(config, "sliding_window", None) if masks else None


def _class(module: object) -> str:
    return type(module).__name__
