"""The sampler's proof: which models pass, which are told what to type, and what a fault in the sampler looks like."""

import dataclasses

import pytest
import torch

from posttrain.config import SamplingConf
from posttrain.errors import UserError
from posttrain.models.architectures import tiny
from posttrain.rollout import local, probe
from posttrain.rollout.probe import reported, verify_sampler

EMBEDDED = ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "qwen3"]


@pytest.mark.parametrize("name", [*EMBEDDED, "llama", "gpt2", "gemma3_text", "gpt_oss", "bamba", "lfm2"])
def test_right_with_padding_and_without(name):
    model = tiny(name)
    for batch in (256, 1):
        proof = verify_sampler(model, SamplingConf(batch_size=batch))
        assert proof.max_difference < 1e-4 and proof.padded is (batch > 1)


def test_a_model_that_padding_changes_is_told_to_sample_one_prompt_a_batch():
    model = tiny("bart")
    with pytest.raises(UserError, match="different lengths.*type rollout.batch_size=1$") as error:
        verify_sampler(model, SamplingConf())
    assert "\n" not in str(error.value)
    assert verify_sampler(model, SamplingConf(batch_size=1)).max_difference < 1e-4


@pytest.mark.parametrize(
    "name, why", [("mamba", "no cache that the sampler knows"), ("roberta", "off by"), ("xlnet", "")]
)
def test_what_cannot_be_sampled_from_is_refused_in_one_line(name, why):
    with pytest.raises(UserError, match=f"cannot be sampled from with a cache: .*{why}.*Take another model$") as error:
        verify_sampler(tiny(name), SamplingConf())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("fault", ["shifted positions", "no mask", "wrong row"])
def test_a_fault_of_the_sampler_shows(monkeypatch, fault):
    model = tiny("qwen3_5_text")
    forward = type(model).forward

    def broken(self, input_ids, attention_mask=None, position_ids=None, **kwargs):
        if fault == "shifted positions" and position_ids is not None and input_ids.shape[1] == 1:
            position_ids = position_ids + 7
        if fault == "no mask":
            attention_mask = None
        if fault == "wrong row" and input_ids.shape[1] == 1:
            input_ids = input_ids.roll(1, 0)
        return forward(self, input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)

    monkeypatch.setattr(type(model), "forward", broken)
    found = reported(model, padded=True)
    assert found > 0.05


def test_some_sequences_end_before_the_others_and_the_model_keeps_its_mode(monkeypatch):
    ended = []
    real = local.generate

    def noted(*args, **kwargs):
        rollouts = real(*args, **kwargs)
        ended.extend(rollout.finished for rollout in rollouts)
        return rollouts

    monkeypatch.setattr(probe, "generate", noted)
    model = tiny("qwen3")
    model.train()
    assert reported(model, padded=True) < 1e-4 and model.training
    assert any(ended) and not all(ended)


def test_nothing_but_fields_of_a_proof():
    proof = verify_sampler(tiny("qwen3"), SamplingConf())
    assert set(dataclasses.asdict(proof)) == {"max_difference", "tolerance", "padded", "seconds"}
    assert proof.tolerance == probe.TOLERANCE[torch.float32]
