"""What transformers keeps private and the project reads all the same, each in one function (seen in 5.15 to 5.23).

What the packing patch replaces is in packed/, with the upstream functions that it replaces.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter

from posttrain.models.text_model import made_class

Interface = type[AttentionInterface] | type[AttentionMaskInterface]


def layer_classes(model: PreTrainedModel) -> list[str]:
    """Names of the decoder layer classes that the model really holds. Upstream's own list has vision blocks too."""
    present = {type(module).__name__ for module in model.modules()}
    return sorted(present & set(model._no_split_modules or []))


def registered(interface: Interface) -> dict[str, Any]:
    """What is registered with one of transformers' interfaces, by name."""
    return interface._global_mapping


def causal_model_class(config_class: type[PreTrainedConfig]) -> type[PreTrainedModel] | None:
    """The causal language model that goes with a class of configs: transformers', or made; None for no text model."""
    # Upstream annotates the values of every such mapping as pairs, which only tokenizers are.
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(config_class, None)
    return found or made_class(config_class)


def is_made(config: PreTrainedConfig) -> bool:
    """Has transformers only a text model without a head for this config?"""
    return type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and made_class(type(config)) is not None


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


def from_config(
    config: PreTrainedConfig, model_class: type[PreTrainedModel] | None = None, **options: Any
) -> PreTrainedModel:
    """A causal language model with random weights, of the class that goes with its config if none is given."""
    if model_class is None and is_made(config):
        model_class = made_class(type(config))
        options.pop("trust_remote_code", None)
    if model_class is not None:
        # The public way goes through the auto classes, which these configs are not in.
        return model_class._from_config(config, **options)
    return AutoModelForCausalLM.from_config(config, **options)


def from_pretrained(path: str, config: PreTrainedConfig, **options: Any) -> Any:
    """As AutoModelForCausalLM.from_pretrained, also for a config that it does not know, and without its report.

    The report has a line for each name that fits nowhere; `output_loading_info` returns the same names.
    """
    made = made_class(type(config)) if is_made(config) else None
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_no_report)
    try:
        return (made or AutoModelForCausalLM).from_pretrained(path, config=config, **options)
    finally:
        logger.removeFilter(_no_report)


def _no_report(record: logging.LogRecord) -> bool:
    return record.module != "loading_report"


def convert_as(whole: PreTrainedConfig, text: PreTrainedConfig) -> None:
    """Give the text model the conversions of layers (fused experts, say) that transformers has for the whole alone.

    Renamings of parts of the whole are left out: `multimodal.renamed` finds them from the names in the files.
    """
    model_class = causal_model_class(type(text))
    if model_class is None or any(map(get_checkpoint_conversion_mapping, (model_class.__name__, text.model_type))):
        return
    inner = [
        entry
        for entry in get_checkpoint_conversion_mapping(whole.model_type) or []
        if isinstance(entry, WeightConverter) or all(pattern.startswith(r"\.") for pattern in entry.source_patterns)
    ]
    if inner:
        register_checkpoint_conversion_mapping(model_class.__name__, inner)
