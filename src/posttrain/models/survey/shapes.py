"""Shapes that the default config of an architecture leaves off and published checkpoints switch on.

A row of the packing table is one architecture as transformers has it by default. Each of these is a row more, by the
name `<architecture>+<what is on>`.
"""

from __future__ import annotations

from typing import Any

HALF = 48  # rotary frequencies of a head of Phi-3: half of its 96 channels


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere+qk_norm": ("cohere", {"use_qk_norm": True}),
    "llama+dynamic": ("llama", _rope("dynamic", factor=4.0)),
    "llama+linear": ("llama", _rope("linear", factor=4.0)),
    "llama+llama3": (
        "llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192),
    ),
    "llama+yarn": ("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=4096)),
    "llama4_text+chunks": ("llama4_text", {"attention_chunk_size": 16}),
    "mistral+window": ("mistral", {"sliding_window": 4096}),
    "phi3+longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 4096,
            "max_position_embeddings": 131072,
            **_rope(
                "longrope",
                short_factor=[1.0] * HALF,
                long_factor=[4.0] * HALF,
                original_max_position_embeddings=4096,
            ),
        },
    ),
    "phimoe+window": ("phimoe", {"sliding_window": 2047}),
    "qwen2+window": ("qwen2", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1}),
    "zamba2+adapters": ("zamba2", {"use_shared_attention_adapter": True, "adapter_rank": 16}),
}
