"""Which layers of a model move information along a row, and what boundaries would have to reach in them."""

from __future__ import annotations

import sys
from types import ModuleType

from torch import nn

from posttrain.models.packed.dispatch import CONVOLUTION, OPERATIONS, STATE


def carries(layer: nn.Module) -> set[str]:
    """What the layer itself carries from token to token: it owns a decay, or a depthwise convolution."""
    found = set()
    if any(name in ("A_log", "dt_bias") for name, _ in layer.named_parameters(recurse=False)):
        found.add(STATE)
    convolutions = (child for child in layer.children() if isinstance(child, nn.Conv1d))
    if any(1 < convolution.groups == convolution.in_channels for convolution in convolutions):
        found.add(CONVOLUTION)
    return found


def stateful_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that carry a state along the row."""
    return [module for module in model.modules() if carries(module)]


def mixers(model: nn.Module) -> list[nn.Module]:
    """Layers that move information along a row: the stateful ones and attention (which has a `layer_idx`)."""
    return [module for module in model.modules() if hasattr(module, "layer_idx") or carries(module)]


def modeling_module(layer: nn.Module) -> ModuleType:
    """The file of transformers that the layer's forward looks its functions up in."""
    return sys.modules[type(layer).forward.__module__]


def unreachable(layer: nn.Module) -> set[str]:
    """What the layer carries and no function of its modeling module could be told to keep apart."""
    module = modeling_module(layer)
    reachable = (operation.carries for name, operation in OPERATIONS.items() if hasattr(module, name))
    return carries(layer).difference(*reachable)
