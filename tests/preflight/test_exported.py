"""An export that is read again at the start: equal, or what is different."""

import pytest
import torch

from posttrain.config import Architecture, ModelConf
from posttrain.errors import UserError
from posttrain.models.loading import load
from posttrain.preflight import exported
from posttrain.preflight.exported import export_and_reload

TEXTS = ["1+2=", "a longer one"]
CONF = ModelConf(architecture=Architecture.qwen3_dense)


def test_the_embedded_models_come_back_equal():
    for architecture in Architecture:
        if architecture is not Architecture.auto:
            cfg = ModelConf(architecture=architecture)
            assert export_and_reload(*load(cfg), cfg, TEXTS) == []


def test_what_an_export_changes_is_named(monkeypatch):
    model, tokenizer = load(CONF)
    real = exported.write

    def spoiling(model, state, tokenizer, path, cfg):
        changed = {n: value + 1 if n == "model.norm.weight" else value for n, value in state.items()}
        tokenizer.chat_template = "{{ messages[0].content }}"
        real(model, changed, tokenizer, path, cfg)

    monkeypatch.setattr(exported, "write", spoiling)
    spoiled = load(CONF)[1]
    weights, *others = export_and_reload(model, spoiled, CONF, TEXTS)
    assert weights == "1 weights have other values, such as model.norm.weight"
    assert others == []  # it is the tokenizer of both


def test_an_export_that_fails_is_a_refusal(monkeypatch):
    model, tokenizer = load(CONF)

    def full(*arguments):
        raise OSError("No space left on device")

    monkeypatch.setattr(exported, "write", full)
    with pytest.raises(UserError, match="the export fails: No space left on device"):
        export_and_reload(model, tokenizer, CONF, TEXTS)


def test_end_tokens_that_change_are_named():
    model, tokenizer = load(CONF)
    again, _ = load(CONF)
    again.generation_config.eos_token_id = [5]
    (line,) = exported._generation(model, again)
    assert "are [5]" in line
    assert torch.equal(model.lm_head.weight, again.lm_head.weight)
