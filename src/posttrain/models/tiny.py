"""The embedded tiny models: real transformers architectures, 0.3 to 1 M parameters, byte-level tokenizer.

They let every command of the project run on a laptop without a network. Their weights lie in
`models/embedded/<architecture>/`, warm-started on the arithmetic task by `make tiny`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

EMBEDDED = Path(__file__).parent / "embedded"
VOCABULARY = 264  # 256 bytes, 5 special tokens, rounded up to a multiple of 8

# head_dim 32 is the smallest that inference engines take; layers keep the families' 3:1 pattern.
_SHAPE: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
    dtype="bfloat16",  # of the file; loaded as fp32
    pad_token_id=257,
    eos_token_id=256,
    bos_token_id=None,
)
_DELTA_NET: dict[str, Any] = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    linear_conv_kernel_dim=4,
)
_EXPERTS: dict[str, Any] = dict(
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=48,
    shared_expert_intermediate_size=64,
)
_MROPE: dict[str, Any] = dict(
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
)


def tiny_config(architecture: str) -> PreTrainedConfig:
    """The transformers config of an embedded model. `architecture` is a value of `config.Architecture`."""
    match architecture:
        case "qwen3_5_dense":
            return Qwen3_5TextConfig(**_SHAPE, **_DELTA_NET, **_MROPE, intermediate_size=192)
        case "qwen3_5_moe":
            return Qwen3_5MoeTextConfig(**_SHAPE, **_DELTA_NET, **_MROPE, **_EXPERTS)
        case "qwen3_next":
            return Qwen3NextConfig(**_SHAPE, **_DELTA_NET, **_EXPERTS, intermediate_size=192)
        case "qwen3_dense":
            return Qwen3Config(**_SHAPE, intermediate_size=256)
    raise ValueError(f"no embedded model of architecture {architecture!r}")


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level: any text round-trips exactly. The turn markers are single tokens, so prompts stay short."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        extra_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    tokenizer.chat_template = (
        "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    return tokenizer
