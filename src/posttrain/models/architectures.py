"""Every architecture that transformers knows as a causal language model, each as a tiny model."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from posttrain.models.internals import causal_model_class, from_config
from posttrain.models.shrink import shrunk, slow_to_forget

# What the default config of an architecture lacks: its model needs it, or it names only one kind of layer.
DEFAULTS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"d_model": 6144, "n_heads": 48, "attn_config": {"kv_n_heads": 8, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "granitemoehybrid": {"layer_types": ["mamba"] * 5 + ["attention"] + ["mamba"] * 26},
    "lfm2": {"full_attn_idxs": [2, 5, 8, 10, 12, 14]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "qwen4_exp_text": dict(
        indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=256, indexer_budget=2048, indexer_compress_ratio=16
    ),
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    "xmod": {"default_language": "en_XX"},
}


def architectures() -> list[str]:
    """Every model type that transformers knows as a causal language model."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def default_config(model_type: str, **fields: Any) -> PreTrainedConfig:
    """The text config of `model_type` as transformers has it by default but for `fields`, made a causal decoder."""
    config = CONFIG_MAPPING[model_type]()
    config.is_encoder_decoder = False
    text = config.get_text_config(decoder=True)
    if changed := DEFAULTS.get(text.model_type, {}) | fields:
        text = type(text)(**changed)
    if getattr(text, "is_decoder", None) is False:
        text.is_decoder = True
    return text


def tiny(model_type: str, **fields: Any) -> PreTrainedModel:
    """A tiny model of `model_type` with `fields` in fp32 and eval mode, its random weights the same each time."""
    config = shrunk(default_config(model_type, **fields))
    model_class = causal_model_class(type(config)) or causal_model_class(CONFIG_MAPPING[model_type])
    if model_class is None:
        raise ValueError(f"transformers knows no causal language model {model_type!r}")
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = from_config(config, model_class, dtype=torch.float32)
    return slow_to_forget(model).eval()
