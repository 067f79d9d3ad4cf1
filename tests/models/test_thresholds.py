"""Lengths at which a model computes something else: found, crossed by probes, refused only if a run reaches them."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from posttrain.config import SamplingConf
from posttrain.errors import UserError
from posttrain.models import gdn_packing
from posttrain.models.architectures import tiny
from posttrain.models.gdn_packing import PackingLeak, boundaries
from posttrain.models.shrink import tiny_copy
from posttrain.models.thresholds import BELOW, lowered, thresholds
from posttrain.rollout.probe import verify_sampler

SHAPE = dict(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    initializer_range=0.2,
)  # fmt: skip


def longrope(original=4096):
    """As Phi-3.5-mini and Phi-4-mini are: other factors beyond the original length."""
    torch.manual_seed(0)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 16,
        "long_factor": [8.0 + n for n in range(16)],
        "original_max_position_embeddings": original,
    }
    config = Phi3Config(**SHAPE, max_position_embeddings=131072, rope_parameters=rope)
    config.original_max_position_embeddings = original
    return Phi3ForCausalLM(config).eval()


def dynamic():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    return LlamaForCausalLM(LlamaConfig(**SHAPE, max_position_embeddings=2048, rope_parameters=rope)).eval()


def test_the_fields_that_hold_them():
    assert thresholds(longrope().config) == {"original_max_position_embeddings": 4096}
    assert thresholds(dynamic().config) == {"max_position_embeddings": 2048}
    assert thresholds(tiny("llama4_text").config) == {"floor_scale": 8192}
    assert thresholds(tiny("deepseek_v32").config) == {"index_topk": 2048}
    assert thresholds(tiny("qwen3").config) == thresholds(tiny("qwen3_5_text").config) == {}
    assert set(thresholds(lowered(longrope().config)).values()) == {BELOW}
    assert thresholds(longrope().config) == {
        "original_max_position_embeddings": 4096
    }  # the config itself is left alone


@torch.no_grad()
def test_a_long_neighbour_does_change_a_short_document():
    """What the probe is for: the real lengths, each document alone in a plain call."""
    model = longrope(64)
    gdn_packing.patch(model)
    ids = torch.randint(64, (140,), generator=torch.Generator().manual_seed(0))
    wanted = model(input_ids=ids[None, :40], use_cache=False).logits
    found = model(input_ids=ids[None], **boundaries((40, 100), "cpu")).logits[:, :40]
    assert (found - wanted).abs().max() > 0.1
    short = model(input_ids=ids[None, :60], **boundaries((40, 20), "cpu")).logits[:, :40]
    torch.testing.assert_close(short, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("packed, what", [(True, "rows"), (False, "documents")])
def test_longrope_is_refused_only_where_the_run_reaches_it(packed, what):
    model = longrope()
    gdn_packing.patch(model, packed=packed)
    assert gdn_packing.verify(model, longest=4096, packed=packed).max_difference < 1e-5
    for longest in (4097, None):
        mode = "thd" if packed else "padded"
        with pytest.raises(
            PackingLeak, match=f"packing={mode} is right for {what} of up to 4,096 tokens.*type "
        ) as error:
            gdn_packing.verify(model, longest=longest, packed=packed)
        assert "\n" not in str(error.value)


def test_a_temperature_by_the_position_in_the_row_leaves_padded_rows_alone():
    model = tiny("llama4_text")
    gdn_packing.patch(model)
    with pytest.raises(PackingLeak, match="rows of up to 8,192 tokens.*floor_scale"):
        gdn_packing.verify(model, longest=8193)
    assert gdn_packing.verify(model, longest=8192).max_difference < 1e-5
    gdn_packing.patch(model, packed=False)
    proof = gdn_packing.verify(model, packed=False)
    assert proof.max_difference < 1e-5 and proof.max_gradient_difference < 1e-4


@pytest.mark.parametrize("make", [longrope, dynamic])
def test_the_sampler_is_proved_across_them(make):
    small = tiny_copy(make(), torch.device("cpu"), torch.float32)
    assert verify_sampler(small.eval(), SamplingConf()).max_difference < 1e-3
    crossing = tiny_copy(make(), torch.device("cpu"), torch.float32, crossing=True)
    with pytest.raises(UserError, match="cannot"):
        verify_sampler(crossing.eval(), SamplingConf())


def test_positions_that_a_checkpoint_was_not_trained_on_are_refused():
    """The RoBERTa family counts from the padding index on; ours from 0 is another model."""
    model = tiny("roberta")
    gdn_packing.patch(model)
    with pytest.raises(PackingLeak, match="counts positions otherwise"):
        gdn_packing.verify(model)
