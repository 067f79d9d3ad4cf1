"""What transformers keeps private and the project reads all the same, each in one function (seen in 5.15 to 5.23).

What the packing patch replaces is in packed/, with the upstream functions that it replaces.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import WeightConverter, WeightRenaming

Interface = type[AttentionInterface] | type[AttentionMaskInterface]


def layer_classes(model: PreTrainedModel) -> list[str]:
    """Names of the decoder layer classes that the model really holds. Upstream's own list has vision blocks too."""
    present = {type(module).__name__ for module in model.modules()}
    return sorted(present & set(model._no_split_modules or []))


def registered(interface: Interface) -> dict[str, Any]:
    """What is registered with one of transformers' interfaces, by name."""
    return interface._global_mapping


def causal_model_class(config_class: type[PreTrainedConfig]) -> type[PreTrainedModel] | None:
    """The causal language model that goes with a class of configs; None if transformers has none."""
    # Upstream annotates the values of every such mapping as pairs, which only tokenizers are.
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(config_class, None)
    return found


def text_body_class(config_class: type[PreTrainedConfig]) -> type[PreTrainedModel] | None:
    """The model without a head that goes with a class of configs; None if transformers has none."""
    found: Any = MODEL_MAPPING.get(config_class, None)
    return found


def parent_class(model_class: type[PreTrainedModel]) -> Any:
    """What every model of a family inherits: which layers it has, and what they can do."""
    return next(each for each in model_class.__mro__[1:] if issubclass(each, PreTrainedModel))


def convert_weights_as(model_type: str, model_class: type[PreTrainedModel]) -> None:
    """Merge and turn the weights of a checkpoint for a class of ours as for `model_type`: experts, above all.

    The renamings among upstream's conversions are for the names of the whole checkpoint, and stay with it.
    """
    conversions = get_checkpoint_conversion_mapping(model_type) or []
    merging: list[WeightConverter | WeightRenaming] = [
        each for each in conversions if isinstance(each, WeightConverter)
    ]
    if merging:
        register_checkpoint_conversion_mapping(model_class.__name__, merging, overwrite=True)


def attention_in_use(config: PreTrainedConfig) -> str:
    """The name of the implementation that a model of this config calls."""
    return str(config._attn_implementation)


def experts_in_use(config: PreTrainedConfig) -> str:
    """The name of the implementation of experts; "None" where the architecture has no choice."""
    return str(getattr(config, "_experts_implementation", None))


def takes_flash_attention(model_class: type | None) -> bool:
    """Can the class run with flash attention? None, for a checkpoint with code of its own, cannot say so."""
    return getattr(model_class, "_supports_flash_attn", False)


def is_compiled(model: nn.Module) -> bool:
    """Has torch.compile been applied to the model, or to a part of it?"""
    return hasattr(model, "_orig_mod") or any(module._compiled_call_impl for module in model.modules())


def from_config(model_class: type[PreTrainedModel], config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """A model with random weights. The public way goes through the auto classes, which some configs are not in."""
    return model_class._from_config(config, **options)
