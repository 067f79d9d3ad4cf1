"""The architectures that pack, by what carries a state along their row, and those that are refused."""

import functools

import pytest
import transformers
from packaging.version import Version
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from posttrain.models.architectures import tiny
from posttrain.models.gdn_packing import patch

STATEFUL = {  # what carries a state along the row
    "qwen3_5_text": "gated delta rule",
    "qwen3_5_moe_text": "gated delta rule",
    "qwen3_next": "gated delta rule",
    "olmo_hybrid": "gated delta rule",
    "qwen4_exp_text": "gated delta rule",
    "kimi_linear": "Kimi delta attention",
    "bailing_hybrid": "Kimi delta attention",
    "nemotron_h": "Mamba-2",
    "bamba": "Mamba-2",
    "falcon_h1": "Mamba-2",
    "granitemoehybrid": "Mamba-2",
    "zamba2": "Mamba-2",
    "lfm2": "short convolution",
    "lfm2_moe": "short convolution",
}
ATTENTION_ONLY = [
    "llama", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3", "olmo2",
    "phi3", "gpt2", "opt", "glm4_moe", "llama4_text", "stablelm",
]  # fmt: skip
REFUSED = {  # and the layer class at fault
    "mamba": "MambaMixer",
    "mamba2": "Mamba2Mixer",
    "falcon_mamba": "FalconMambaMixer",
    "jamba": "JambaMambaMixer",
    "zamba": "ZambaMambaMixer",
    "recurrent_gemma": "RecurrentGemmaRecurrentBlock",
    "inkling_text": "InklingShortConvolution",
    "minimax": "MiniMaxLightningAttention",
    "rwkv": "RwkvForCausalLM",
    "bloom": "BloomAttention",
}


SINCE = {"nemotron_h": "5.17", "falcon_h1": "5.17", "llama4_text": "5.20"}  # before, the probe refuses them


def known(names):
    """Those that pack in the installed transformers."""
    installed = Version(transformers.__version__)
    old = pytest.mark.skip(reason="not in this version of transformers, or refused there")
    return [
        name
        if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and installed >= Version(SINCE.get(name, "5.15"))
        else pytest.param(name, marks=old)
        for name in names
    ]


KIMI = pytest.mark.skipif("kimi_linear" not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, reason="not in this version")


@functools.cache
def patched(name):
    """The tiny model of an architecture, patched, made once."""
    model = tiny(name)
    patch(model)
    return model
