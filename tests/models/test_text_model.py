"""Causal models around text models that have none: packed, padded, sampled, counted, and what is no text model."""

import pytest
import torch
from test_multimodal import IDS, small
from transformers import BertConfig, CLIPTextConfig, Qwen3Config, Siglip2TextConfig, ViTConfig

from posttrain.flops import counter, size
from posttrain.models import gdn_packing
from posttrain.models.head import find_head
from posttrain.models.internals import causal_model_class, from_config, is_made, layer_classes
from posttrain.models.shrink import slow_to_forget, tiny_copy
from posttrain.models.text_model import made_class
from posttrain.rollout.probe import TOLERANCE, reported

MADE = """
cosmos3_edge ernie4_5_vl_moe glm4v glm4v_moe glm_ocr granite4_vision paddleocr_vl qwen2_5_omni_thinker qwen2_5_vl
qwen2_vl qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe
""".split()
# Cross-attention, and attention that chooses its keys.
NOT_COUNTED = ["glm5_next", "mllama"]


def made(model_type):
    config = small(model_type).get_text_config(decoder=True)
    assert is_made(config)
    torch.manual_seed(0)
    return slow_to_forget(from_config(config, dtype=torch.float32)).eval()


@pytest.mark.parametrize("model_type", [*MADE, "mllama"])
def test_it_is_packed_padded_and_sampled_as_the_model_itself(model_type):
    model = made(model_type)
    gdn_packing.patch(model)
    for packed in (True, False):
        proof = gdn_packing.verify(model, longest=256, packed=packed)
        assert proof.max_difference < 1e-4 and proof.max_gradient_difference < 1e-4
    assert reported(model, True) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("model_type", MADE)
def test_its_flops_equal_what_its_mask_lets_the_counter_see(model_type):
    model = made(model_type)
    assert size(model).forward([70], 5) == counter.count(model, [70], 5)[0]


@pytest.mark.parametrize("model_type", NOT_COUNTED)
def test_flops_that_are_not_known_are_absent(model_type):
    with pytest.raises(ValueError, match="chooses its keys|no way to mix tokens"):
        size(made(model_type))


@torch.no_grad()
def test_logits_are_of_the_positions_that_are_asked_for():
    model = made("qwen2_vl")
    all_BTV = model(input_ids=IDS).logits
    assert all_BTV.shape == (1, IDS.shape[1], model.config.vocab_size)
    torch.testing.assert_close(model(input_ids=IDS, logits_to_keep=2).logits, all_BTV[:, -2:])
    kept_K = torch.tensor([1, 5])
    torch.testing.assert_close(model(input_ids=IDS, logits_to_keep=kept_K).logits, all_BTV[:, kept_K])


@pytest.mark.parametrize("model_type", ["qwen2_vl", "granite4_vision"])
def test_a_cache_is_made_where_it_is_asked_for(model_type):
    model = made(model_type)
    assert model(input_ids=IDS, use_cache=True).past_key_values.get_seq_length() == IDS.shape[1]
    assert model(input_ids=IDS, use_cache=False).past_key_values is None


def test_it_generates_saves_and_loads_as_a_model_of_transformers(tmp_path):
    model = made("qwen3_vl_moe")
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)
    assert model.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0).shape[1] == IDS.shape[1] + 3


def test_its_head_is_found_and_a_small_copy_has_its_class():
    model = made("qwen3_vl")
    assert find_head(model).linear is model.lm_head
    assert type(tiny_copy(model, torch.device("cpu"), torch.float32)) is type(model)


@pytest.mark.parametrize("model_type", MADE)
def test_its_layers_are_sharded_one_by_one(model_type):
    model = made(model_type)
    assert {type(layer).__name__ for layer in model.model.layers} == set(layer_classes(model))


def test_what_is_no_text_decoder_gets_no_model_and_a_causal_model_of_transformers_stays():
    for config_class in (BertConfig, CLIPTextConfig, Siglip2TextConfig, ViTConfig):
        assert made_class(config_class) is None
    assert causal_model_class(ViTConfig) is None
    assert causal_model_class(Qwen3Config).__name__ == "Qwen3ForCausalLM" and not is_made(Qwen3Config())
