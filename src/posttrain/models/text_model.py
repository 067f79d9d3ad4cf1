"""The causal language model of a text config: transformers' own, or one made of its text body and a plain head.

transformers has a causal class for most text models. Of some multimodal types (Qwen2-VL, Qwen3-VL, GLM-4V, ...) it has
the text body alone, which the multimodal class puts a head on. `language_model_class` makes that class here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from posttrain.models.internals import causal_model_class, from_config, parent_class, text_body_class

HEAD = "lm_head.weight"


def text_model_classes(config: PreTrainedConfig) -> list[type[PreTrainedModel]]:
    """What a text config can be a causal model of, the likelier one first; empty where transformers has no text body.

    A causal class of transformers may do to its logits what the multimodal class does not: the plain one is next.
    """
    theirs = causal_model_class(type(config))
    body = text_body_class(type(config))
    ours = [] if body is None else [language_model_class(body)]
    return ours if theirs is None else [theirs, *ours]


def body_name(model: PreTrainedModel) -> str:
    """What the text body is called within a causal model: the prefix of its weights."""
    base = model.base_model_prefix
    if base and hasattr(model, base):
        return base
    body = text_body_class(type(model.config))
    return next(name for name, part in model.named_children() if body is not None and isinstance(part, body))


def random_model(config: PreTrainedConfig, trust_remote_code: bool = False, **options: Any) -> PreTrainedModel:
    """The causal language model of a text config with random weights.

    Raises ValueError where there is none.
    """
    if causal_model_class(type(config)) is None and not trust_remote_code and (own := text_model_classes(config)):
        return from_config(own[0], config, **options)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **options)
    return made


_made: dict[Any, type[PreTrainedModel]] = {}


def is_ours(model_class: type[PreTrainedModel]) -> bool:
    """Was the class made here?"""
    return model_class in _made.values()


def language_model_class(body_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A class of `body_class` and a linear head without bias: logits are the head's output, and nothing else.

    The same class each time: kinds of modules are compared by it.
    """
    if body_class not in _made:
        _made[body_class] = _with_head(body_class)
    return _made[body_class]


def _with_head(body_class: type[PreTrainedModel]) -> type[PreTrainedModel]:

    class LanguageModel(parent_class(body_class), GenerationMixin):  # type: ignore[misc]
        _tied_weights_keys = {HEAD: "model.embed_tokens.weight"}
        base_model_prefix = "model"

        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            self.model = body_class(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(
            self,
            input_ids: torch.Tensor | None = None,
            attention_mask: torch.Tensor | None = None,
            position_ids: torch.Tensor | None = None,
            past_key_values: Any = None,
            inputs_embeds: torch.Tensor | None = None,
            use_cache: bool | None = None,
            logits_to_keep: int | torch.Tensor = 0,
            **kwargs: Any,
        ) -> CausalLMOutputWithPast:
            """Logits [B, T, V], or of the last `logits_to_keep` positions, or of those that it lists."""
            out = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
                **kwargs,
            )
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits: Any = self.lm_head(out.last_hidden_state[:, kept])
            return CausalLMOutputWithPast(logits=logits, past_key_values=out.past_key_values)

    LanguageModel.__name__ = LanguageModel.__qualname__ = f"{body_class.__name__}WithHead"
    # transformers reads in the source of a class's module what its layers can do.
    LanguageModel.__module__ = body_class.__module__
    return LanguageModel
