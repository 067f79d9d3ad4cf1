"""What becomes of logits after a model's head, found by behaviour; and logprobs of every architecture's own head."""

import dataclasses

import pytest
import torch
from logprob_cases import VOCABULARY, assert_close, gradients_of, of_own_logits, row_of, small
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from posttrain import logprobs
from posttrain.logprobs import token_logprobs
from posttrain.models import gdn_packing
from posttrain.models.architectures import architectures, tiny
from posttrain.models.head import find_head

NEEDS_ANOTHER_MODEL = {"gemma4_assistant", "gemma4_unified_assistant"}  # drafts from the states of a larger model
NOT_PLAIN_TEXT = {"musicgen", "musicgen_melody"}  # several codebooks a position
FULL_LOGITS = {"prophetnet"}  # its head predicts several tokens


@pytest.fixture(autouse=True)
def the_same_numbers_in_any_order():
    torch.manual_seed(0)


ARCHITECTURES = {
    "llama": ({}, 1, None),
    "qwen3_5_text": ({}, 1, None),
    "qwen3_next": ({}, 1, None),
    "gpt2": ({}, 1, None),  # tied
    "phi": ({}, 1, None),  # a bias
    "bart": ({}, 1, None),  # its layers are two levels down
    "xlm": ({}, 1, None),  # its head is in a module of its own
    "trocr": ({}, 1, None),  # it does not know logits_to_keep
    "opt": ({}, 1, None),
    "mixtral": ({}, 1, None),
    "granite": ({"logits_scaling": 6.0}, 1 / 6, None),
    "granitemoehybrid": ({"logits_scaling": 8.0}, 0.125, None),
    "cohere": ({"logit_scale": 0.0625}, 0.0625, None),
    "falcon_h1": ({"lm_head_multiplier": 0.3}, 0.3, None),
    "gemma2": ({"final_logit_softcapping": 2.5}, 1, 2.5),
    "gemma3_text": ({"final_logit_softcapping": None}, 1, None),
    "nanochat": ({}, 1, 15.0),
}


@pytest.mark.parametrize("model_type", [name for name in ARCHITECTURES if name in architectures()])
def test_each_architecture_against_its_own_logits(model_type, monkeypatch):
    """Through chunks and through full logits; and nothing stays on the model."""
    fields, scale, cap = ARCHITECTURES[model_type]
    model, row, weights = small(model_type, **fields), row_of(), torch.randn(2, 2, 4)
    state = torch.get_rng_state()
    head = find_head(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert head.linear is model.get_output_embeddings(), head.description
    assert (head.scale, head.cap) == (pytest.approx(scale, rel=1e-6), cap)
    wanted = of_own_logits(model, row)
    wanted_gradients = gradients_of(model, wanted, weights)
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 1)
    for way in (head, dataclasses.replace(head, linear=None)):
        found = token_logprobs(model, row, 0.6, way, entropy_gradient=True)
        for value, right in zip(found, wanted, strict=True):
            assert value.dtype == torch.float32 and (value - right).abs().max() < 1e-5 * max(1, right.abs().max())
        for name, gradient in gradients_of(model, found, weights).items():
            right = wanted_gradients[name]
            assert (gradient - right).abs().max() <= 1e-4 * right.abs().max() + 1e-6, name
        assert not token_logprobs(model, row, 0.6, way)[1].requires_grad
        with torch.no_grad():
            for value, right in zip(token_logprobs(model, row, 0.6, way), found, strict=True):
                assert torch.equal(value, right) and not value.requires_grad
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(set(architectures()) - NEEDS_ANOTHER_MODEL - NOT_PLAIN_TEXT))
@torch.no_grad()
def test_every_architecture(model_type):
    model = tiny(model_type)
    row = row_of(min(60, model.config.get_text_config(decoder=True).vocab_size))
    gdn_packing.patch(model, packed=False)
    head = find_head(model)
    assert (head.linear is None) == (model_type in FULL_LOGITS), head.description
    for value, right in zip(token_logprobs(model, row, 0.6, head), of_own_logits(model, row), strict=True):
        assert (value - right).abs().max() < 1e-5 * max(1, right.abs().max())


class Changed(LlamaForCausalLM):
    """Does something to logits after its head."""

    change = staticmethod(lambda logits: logits)

    def forward(self, **inputs):
        output = super().forward(**inputs)
        output.logits = type(self).change(output.logits)
        return output


class DeepOnly(LlamaForCausalLM):
    def __init__(self, config):
        if config.num_hidden_layers < 4:
            raise ValueError("four layers at least")
        super().__init__(config)


class OwnLinear(nn.Linear):
    pass


CONFIG = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2
)
BIAS = torch.arange(VOCABULARY) % 7.0


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda logits: logits + BIAS[: logits.shape[-1]], "changes them after its head"),
        (lambda logits: logits * (1 + BIAS)[: logits.shape[-1]], "changes them after its head"),
        (lambda logits: logits.sign() * logits.abs().sqrt(), "changes them after its head"),
        (lambda logits: torch.nn.functional.softsign(logits / 9) * 9, "changes them after its head"),
        (lambda logits: logits.log_softmax(-1), "changes them after its head"),
        (lambda logits: logits.clamp(-50, 50), "changes them after its head"),
        (lambda logits: logits.detach(), "could not be tried"),
        (lambda logits: logits[..., :290], "could not be tried"),
        (lambda logits: logits.view(*logits.shape[:2], VOCABULARY), "could not be tried"),
    ],
)
def test_what_is_not_recognised_takes_full_logits(change, why, monkeypatch):
    monkeypatch.setattr(Changed, "change", staticmethod(change))
    head = find_head(Changed(CONFIG))
    assert head.linear is None and head.description.startswith("full logits: Changed ") and why in head.description


@pytest.mark.parametrize("change", [lambda x: 0.3 * x, lambda x: 0.3 * (x / 7).tanh() * 7, lambda x: -x.float()])
def test_what_is_recognised(change, monkeypatch):
    monkeypatch.setattr(Changed, "change", staticmethod(change))
    model, row, weights = Changed(CONFIG), row_of(), torch.randn(2, 2, 4)
    ways = [head := find_head(model), dataclasses.replace(head, linear=None)]
    assert head.linear is model.lm_head
    found, wanted = (token_logprobs(model, row, 0.6, way, entropy_gradient=True) for way in ways)
    assert_close(found, wanted, 1e-5)
    gradients_found, gradients_wanted = (gradients_of(model, each, weights) for each in (found, wanted))
    assert_close(gradients_found.values(), gradients_wanted.values(), 1e-4)


def test_heads_that_are_no_plain_linear_layer():
    hooked, other, bare = (LlamaForCausalLM(CONFIG) for _ in range(3))
    hooked.lm_head.register_forward_hook(lambda *call: call[2])
    other.lm_head = OwnLinear(64, VOCABULARY)
    bare.set_output_embeddings(None)
    for model in (hooked, other, bare):
        head = find_head(model)
        assert (head.linear, head.description) == (
            None,
            "full logits: the head of LlamaForCausalLM is no plain linear layer",
        )
    assert find_head(DeepOnly(CONFIG)).description == "full logits: DeepOnly has no tiny copy that could be tried"


def test_a_model_without_memory():
    """Neither weights nor layers of the model itself run: it may be on any device, and of any size."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=80, hidden_size=8192, vocab_size=128256))
    with torch.no_grad():
        assert find_head(model).linear is model.lm_head
