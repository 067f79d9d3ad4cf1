"""The count against torch's FLOP counter on running models."""

import pytest
import torch
from flop_cases import ATTENTION_ONLY, FAMILIES, TOKENS, build, counted, counters_excess
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.config import RolloutConf
from posttrain.flops import causal_pairs, counter, forward_flops, size
from posttrain.models import gdn_packing
from posttrain.models.architectures import tiny
from posttrain.models.tiny import tiny_config
from posttrain.records import Problem
from posttrain.rollout.local import generate

# Against the counter that sees what the mathematics needs. Attention that upstream keeps apart by position_ids:
BY_POSITION = [
    *("qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3", "qwen3_moe", "llama", "mistral", "mixtral", "gemma2", "gemma3"),
    *("deepseek_v3", "olmo2", "olmo_hybrid", "phi", "starcoder2", "gpt2", "gpt_neox", "cohere", "dbrx", "glm4_moe"),
    *("granite", "kimi_linear", "falcon_h1", "mamba2", "mamba", "lfm2", "jamba"),
]
BY_BOUNDARIES = ["opt", "gpt_oss", "llama"]  # by ours, document by document, but dense within each
IN_A_ROW = ["llama4_text", "bart", "bert"]  # not kept apart
DENSE = ["falcon", "gpt_neo", "bloom"]  # a multiplication of every query and key, then the mask


@pytest.mark.parametrize("model_type", [*BY_POSITION, *BY_BOUNDARIES[:2], *IN_A_ROW])
def test_a_document_equals_what_its_mask_lets_the_counter_see(model_type):
    model = tiny(model_type)
    seen, attention_was_seen = counter.count(model, [TOKENS], 5)
    assert size(model).forward([TOKENS], 5) == seen
    assert attention_was_seen == bool(size(model).forward_cost.per_pair)


@pytest.mark.parametrize("model_type", BY_POSITION)
def test_a_packed_row_equals_what_its_mask_lets_the_counter_see(model_type):
    model, lengths = tiny(model_type), [33, 1, 36]
    assert size(model).forward(lengths, TOKENS) == counter.count(model, lengths)[0]


@pytest.mark.parametrize("model_type", BY_BOUNDARIES)
def test_a_packed_row_with_boundaries_equals_the_counter(model_type):
    model, lengths = tiny(model_type), [200, 9, 9]  # documents of similar length would be padded to one batch
    model.set_attn_implementation("eager")
    model.set_experts_implementation("batched_mm")
    gdn_packing.patch(model)
    marks = gdn_packing.boundaries(lengths, torch.device("cpu"))
    with FlopCounterMode(display=False) as seen, torch.no_grad():
        model(torch.arange(sum(lengths))[None] % 60, **marks)
    assert size(model).forward_cost.dense(lengths, sum(lengths)) == seen.get_total_flops()


@pytest.mark.parametrize("model_type", DENSE)
def test_dense_attention_equals_the_counter(model_type):
    model = tiny(model_type)
    seen, attention_was_seen = counter.count(model, [TOKENS])
    assert not attention_was_seen
    assert size(model).forward_cost.dense([TOKENS], TOKENS) == seen > size(model).forward([TOKENS], TOKENS)


def test_the_window_of_local_attention_is_that_of_its_own_mask():
    model = tiny("gpt_neo")
    masks = [block.attn.attention.bias[0, 0, :TOKENS, :TOKENS] for block in model.transformer.h]
    pairs = {int(mask.sum()) for mask in masks}
    assert pairs == {causal_pairs([TOKENS], window) for window in size(model).forward_cost.per_pair}
    assert len(pairs) == 2


@pytest.mark.parametrize("model_type", ["qwen3_5", "kimi_linear", "mamba2", "mamba", "mistral", "llama4_text"])
def test_what_the_counter_sees_is_the_model(model_type):
    """The recurrences and the attention that it counts give what upstream's own functions give."""
    model, ids_T = tiny(model_type), torch.arange(TOKENS)[None] % 60
    with torch.no_grad():
        upstream = model(ids_T, use_cache=False).logits
        counter.count(model, [TOKENS])
        with counter.recurrences(model):
            counted_as = model(ids_T, use_cache=False).logits
    assert not torch.equal(counted_as, upstream)
    torch.testing.assert_close(counted_as, upstream, rtol=1e-4, atol=1e-4 * float(upstream.abs().max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_equals_the_flop_counter(family):
    model = build(family)
    expected = counted(model) - counters_excess(model.config, TOKENS)
    assert size(model).forward([TOKENS], TOKENS) == expected


@pytest.mark.parametrize("family", ATTENTION_ONLY)
def test_training_equals_the_flop_counter(family):
    model = build(family)
    expected = counted(model, backward=True) - 3 * counters_excess(model.config, TOKENS)
    assert size(model).training([TOKENS], TOKENS) == expected


def test_layers_are_those_of_the_decoder_where_an_encoder_has_others():
    config = AutoConfig.for_model("blenderbot", d_model=32, decoder_ffn_dim=32, decoder_layers=3, vocab_size=64)
    config.is_encoder_decoder, config.is_decoder = False, True
    assert config.num_hidden_layers == 2
    model = AutoModelForCausalLM.from_config(config).eval()
    assert size(model).forward([TOKENS], TOKENS) == counter.count(model, [TOKENS])[0]


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "qwen3_next"])
def test_lm_head_is_billed_for_positions_with_logits(family):
    model = build(family)
    expected = counted(model, logits=5) - counters_excess(model.config, TOKENS)
    assert size(model).forward([TOKENS], 5) == expected


def test_rollout_against_the_counter_around_the_sampler():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3_dense"), attn_implementation="eager").eval()
    problem = Problem(task="", index=0, prompt="", prompt_ids=tuple(range(1, 31)), answer="")
    cfg = RolloutConf(group_size=4, max_new_tokens=5)
    with FlopCounterMode(display=False) as seen:
        rollouts = generate(model, [(n, problem) for n in range(3)], cfg, key=(0,), end_ids=[], pad_id=0)
    assert [rollout.written_tokens for rollout in rollouts] == [5] * 12
    per_pair = 4 * 4 * 32 * 4  # 2 for each of query-key and weight-value, 4 heads of 32, 4 layers
    above_the_diagonal = 3 * per_pair * (30 * 30 - 30 * 31 // 2)  # the counter takes the prefill for dense
    wanted = size(model).rollout([(30, [5] * 4)] * 3) + above_the_diagonal
    assert seen.get_total_flops() == pytest.approx(wanted, rel=1e-9)


def test_widths_in_nested_configs():
    model = tiny("dbrx")
    for block in model.transformer.blocks:
        block.ffn.top_k = 3
    ffn, hidden, layers = model.config.ffn_config, model.config.d_model, model.config.n_layers
    assert forward_flops(model, [TOKENS])["experts"] == layers * TOKENS * 6 * hidden * ffn.ffn_hidden_size * 3
    assert size(model).forward([TOKENS], TOKENS) == counter.count(model, [TOKENS])[0]
