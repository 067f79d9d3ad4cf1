"""A causal language model around the text model of a multimodal class, where transformers has none of its own.

Qwen2-VL, GLM-4V and their kin have a class for the text model and one for the whole, and nothing between: the class
made here is the text model, a linear head without a bias, and transformers' loading, saving and generation. Whether
the whole makes its logits so is never taken for granted, see `multimodal.compared`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

from torch import Tensor, nn
from transformers import MODEL_MAPPING, DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


def made_class(config_class: type[PreTrainedConfig]) -> type[PreTrainedModel] | None:
    """The class of causal language models for a class of text configs; None where no text model goes with it."""
    # mypy takes a class of configs for as unhashable as a config.
    return _made(config_class)  # type: ignore[arg-type]


@functools.cache
def _made(config_class: type[PreTrainedConfig]) -> type[PreTrainedModel] | None:
    body = text_body(config_class)
    if body is None:
        return None
    # The class above the body has the rules of the family: how weights begin, which attention it takes.
    family = next(base for base in body.__mro__[1:] if issubclass(base, PreTrainedModel))
    name = f"{body.__name__.removesuffix('Model')}ForCausalLM"
    fields: dict[str, Any] = {
        # transformers reads in a class's module what its attention can do, and converts the weights of its own only.
        "__module__": body.__module__,
        "__doc__": f"{body.__name__} with a head.",
        "body_class": body,
        "config_class": config_class,
        "base_model_prefix": "model",
        "_tied_weights_keys": {"lm_head.weight": "model.embed_tokens.weight"},
    }
    return type(name, (_WithHead, family, GenerationMixin), fields)


def text_body(config_class: type[PreTrainedConfig]) -> type[PreTrainedModel] | None:
    """The text model without a head that goes with a class of text configs: registered, or beside it by its name."""
    try:
        registered: Any = MODEL_MAPPING.get(config_class, None)
    # Upstream names classes that it does not have.
    except ValueError:
        registered = None
    if registered is not None:
        return registered if _decodes(registered) else None
    try:
        module = importlib.import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
    except ImportError:
        return None
    beside = [item for item in vars(module).values() if getattr(item, "config_class", None) is config_class]
    return next((item for item in beside if _decodes(item)), None)


def _decodes(model_class: type[PreTrainedModel]) -> bool:
    """Whether a class is a decoder without a head: text encoders call their embeddings otherwise, or see both ways."""
    if not model_class.__name__.endswith("TextModel"):
        return False
    source = inspect.getsource(model_class)
    return "self.embed_tokens" in source and "causal" in source


class _WithHead:
    """What every class of `made_class` does; `body_class` is its text model."""

    body_class: type[PreTrainedModel]

    def __init__(self: Any, config: PreTrainedConfig) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.model = self.body_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [B, K, V] of ids [B, T]: K is T, the last `logits_to_keep` positions, or the positions in it."""
        if use_cache and past_key_values is None:
            # Not every text model makes one where its whole does.
            past_key_values = DynamicCache(config=self.config)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        return CausalLMOutputWithPast(logits=logits, past_key_values=outputs.past_key_values)
