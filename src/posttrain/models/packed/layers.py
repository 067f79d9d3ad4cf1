"""Which layers of a model move information along a row."""

from __future__ import annotations

from torch import nn


def stateful_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that carry a state along the row: those that own a decay or a depthwise convolution."""

    def is_stateful(module: nn.Module) -> bool:
        decays = any(name in ("A_log", "dt_bias") for name, _ in module.named_parameters(recurse=False))
        convolutions = (child for child in module.children() if isinstance(child, nn.Conv1d))
        return decays or any(1 < convolution.groups == convolution.in_channels for convolution in convolutions)

    return [module for module in model.modules() if is_stateful(module)]


def mixers(model: nn.Module) -> list[nn.Module]:
    """Layers that move information along a row: the stateful ones and attention (which has a `layer_idx`)."""
    stateful = set(stateful_layers(model))
    return [module for module in model.modules() if module in stateful or hasattr(module, "layer_idx")]
