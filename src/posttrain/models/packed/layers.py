"""Which layers of a model move information along a row, and what boundaries would have to reach in them."""

from __future__ import annotations

import sys
from types import ModuleType

from torch import nn

from posttrain.models.packed.dispatch import CONVOLUTION, OPERATIONS, STATE


def carried(model: nn.Module) -> dict[nn.Module, set[str]]:
    """What the layers of a model carry from token to token: a decay says a state, a depthwise convolution itself.

    The layer is the nearest module around it that knows its place in the stack (`layer_idx`), if there is one.
    """
    found: dict[nn.Module, set[str]] = {}

    def look(module: nn.Module, layer: nn.Module | None) -> None:
        layer = module if hasattr(module, "layer_idx") else layer
        if any(name in ("A_log", "dt_bias") for name, _ in module.named_parameters(recurse=False)):
            found.setdefault(layer or module, set()).add(STATE)
        for child in module.children():
            if isinstance(child, nn.Conv1d) and 1 < child.groups == child.in_channels:
                found.setdefault(layer or module, set()).add(CONVOLUTION)
            look(child, layer)

    look(model, None)
    return found


def mixers(model: nn.Module) -> list[nn.Module]:
    """Layers that move information along a row: those that carry a state, and attention (which has a `layer_idx`)."""
    stateful = carried(model)
    return [module for module in model.modules() if hasattr(module, "layer_idx") or module in stateful]


def modeling_module(layer: nn.Module) -> ModuleType:
    """The file of transformers that the layer's forward looks its functions up in."""
    owner = next(base for base in type(layer).__mro__ if "forward" in vars(base))  # a decorator may hide forward's own
    return sys.modules[owner.__module__]


def unreachable(layer: nn.Module, what: set[str]) -> set[str]:
    """Those of `what` the layer carries that no function of its modeling module could be told to keep apart."""
    module = modeling_module(layer)
    reachable = (operation.carries for name, operation in OPERATIONS.items() if hasattr(module, name))
    return what.difference(*reachable)
