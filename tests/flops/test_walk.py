"""The walk over a model's modules: against formulas in config fields, by part, and wrapped in any way."""

import pytest
import torch
from flop_cases import FAMILIES, LATENT, SHAPE, TOKENS, build, counted, counters_excess
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from posttrain.flops import forward_flops, size
from posttrain.models.architectures import tiny


@pytest.mark.parametrize("model_type", ["qwen3_5_moe", "gpt_oss", "deepseek_v3", "falcon_h1", "lfm2", "bert", "gemma2"])
def test_parts_sum_to_the_forward_pass(model_type):
    model, lengths = tiny(model_type), [33, 1, 500]
    parts = forward_flops(model, lengths, logit_positions=9)
    assert sum(parts.values()) == size(model).forward(lengths, 9)
    assert all(flops > 0 for flops in parts.values())
    assert sum(forward_flops(model, lengths).values()) == size(model).forward(lengths, sum(lengths))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_tied_head_is_counted_once(family):
    tied, untied = (build(family, tie_word_embeddings=tie) for tie in (True, False))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert size(tied) == size(untied)


def published_formula(config, lengths, logits):
    """Forward FLOPs of the Qwen hybrids in config fields, for shapes too large to run."""
    hidden, tokens = config.hidden_size, sum(lengths)
    heads, kv, head = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    full = 2 * hidden * tokens * (2 * heads * head + 2 * kv * head)  # the query projection holds a gate too
    full += 2 * tokens * heads * head * hidden
    full += 2 * heads * head * sum(length * (length + 1) for length in lengths)
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    linear = 2 * hidden * tokens * (2 * keys + 2 * values + 2 * config.linear_num_value_heads)
    linear += 2 * tokens * values * hidden + 2 * config.linear_conv_kernel_dim * (2 * keys + values) * tokens
    linear += 6 * values * config.linear_key_head_dim * tokens
    if hasattr(config, "num_experts"):
        experts = config.num_experts_per_tok * config.moe_intermediate_size
        mlp = 6 * hidden * (experts + config.shared_expert_intermediate_size)
        mlp = tokens * (mlp + 2 * hidden * config.num_experts + 2 * hidden)
    else:
        mlp = 6 * hidden * config.intermediate_size * tokens
    kinds = config.layer_types
    cores = kinds.count("full_attention") * full + kinds.count("linear_attention") * linear
    return cores + len(kinds) * mlp + 2 * hidden * config.vocab_size * logits


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
def test_published_shapes(family):
    config = AutoConfig.for_model(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    lengths = [4096] * 7 + [32768, 1]
    assert size(model).forward(lengths, 999) == published_formula(config, lengths, 999)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_vision_tower_is_not_billed_to_text(family):
    fields = FAMILIES[f"{family}_text"]
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = AutoConfig.for_model(family, text_config=SHAPE | fields, vision_config=vision)
    with torch.device("meta"):
        both = AutoModelForImageTextToText.from_config(config)
    assert any("visual" in name for name, _ in both.named_modules())
    assert size(both) == size(build(f"{family}_text", device="meta"))


@pytest.fixture
def four_ranks():
    """A process group of four ranks, three of them imaginary: enough to shard, not to communicate."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "gpt2"])
def test_counts_the_same_after_fsdp2(family, four_ranks):
    model = build(family)
    before = size(model)
    for layer in model.get_decoder().layers if family != "gpt2" else model.transformer.h:
        fully_shard(layer)
    fully_shard(model)
    weight = next(weight for weight in model.parameters() if weight.ndim >= 2)
    assert weight.to_local().shape != weight.shape
    assert size(model) == before


def test_counts_the_same_inside_ddp(four_ranks):
    model = build("llama")
    assert size(nn.parallel.DistributedDataParallel(model)) == size(model)


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "gpt2"])
def test_counts_the_same_compiled_and_checkpointed(family):
    model = build(family)
    before = size(model)
    assert size(torch.compile(model)) == before
    layers = model.transformer.h if family == "gpt2" else model.model.layers
    for n, layer in enumerate(layers):
        layers[n] = checkpoint_wrapper(layer)
    assert size(model) == before


def test_a_layer_that_runs_twice_is_billed_twice():
    model = build("llama")
    model.model.layers[3] = model.model.layers[0]
    assert len(list(model.model.layers.parameters())) < len(list(build("llama").model.layers.parameters()))
    assert size(model).forward([TOKENS], TOKENS) == counted(model) - counters_excess(model.config, TOKENS)


class ListedExperts(nn.Module):
    """A mixture of experts as a list of MLPs, as models that bring their own code write it."""

    def __init__(self, experts, top_k):
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(64, len(experts), bias=False)
        self.experts = nn.ModuleList(experts)


def test_experts_in_a_list_are_billed_for_those_a_token_passes():
    dense, listed = build("llama"), build("llama")
    for layer in listed.model.layers:
        layer.mlp = ListedExperts([type(layer.mlp)(listed.config) for _ in range(6)], top_k=2)
    mlp, routers = 4 * 6 * 64 * 96, 4 * 2 * 64 * 6
    difference = size(listed).forward_cost.per_token - size(dense).forward_cost.per_token
    assert difference == pytest.approx(mlp + routers, rel=1e-12)


def test_mixture_of_experts_without_a_dense_width():
    model = build("qwen3_5_moe_text", device="meta")
    del model.config.intermediate_size  # SHAPE has one, checkpoints do not
    parts, hidden = forward_flops(model, [TOKENS]), 64
    assert parts["experts"] == 4 * TOKENS * 6 * hidden * 2 * 40
    assert parts["router"] == 4 * TOKENS * 2 * hidden * 8
    assert parts["shared experts"] == 4 * TOKENS * (6 * hidden * 56 + 2 * hidden)
    assert "dense MLP" not in parts


def test_shared_experts_have_the_width_of_experts():
    parts = forward_flops(build("deepseek_v3", device="meta", n_shared_experts=3), [TOKENS])
    assert parts["shared experts"] == 3 * TOKENS * 6 * 64 * 3 * 40  # the first of four layers is dense
    assert parts["dense MLP"] == TOKENS * 6 * 64 * 96


def test_experts_whose_width_is_the_intermediate_size():
    parts = forward_flops(build("gpt_oss", device="meta", num_experts_per_tok=2), [TOKENS])
    assert parts["experts"] == 4 * TOKENS * 6 * 64 * 2 * 96


@pytest.mark.parametrize("family, window", [("qwen3", None), ("mistral", 16)])
def test_heads_that_do_not_fill_the_width_and_a_window(family, window):
    fields = {"sliding_window": window} if window else {}
    parts = forward_flops(build(family, device="meta", **fields), [TOKENS, 9])
    seen = sum(min(p, window or p) for length in (TOKENS, 9) for p in range(1, length + 1))
    assert parts["attention core"] == 4 * 4 * 4 * 24 * seen
    assert parts["attention projections"] == 4 * (TOKENS + 9) * 2 * 64 * 24 * (4 + 2 + 2 + 4)


def test_gated_attention_has_a_query_projection_twice_as_wide():
    kinds = ["full_attention"] * 4
    parts = forward_flops(build("qwen3_next", device="meta", layer_types=kinds), [TOKENS])
    assert parts["attention projections"] == 4 * TOKENS * 2 * 64 * 24 * (2 * 4 + 2 + 2 + 4)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_multi_token_prediction_is_not_billed(family):
    fields = LATENT if family == "glm4_moe" else {}
    fields = {key: fields[key] for key in fields if key.startswith(("n_", "num_", "first", "moe", "topk"))}
    without, with_ = (build(family, device="meta", num_nextn_predict_layers=n, **fields) for n in (0, 1))
    assert with_.config.num_nextn_predict_layers == 1
    assert size(with_) == size(without)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "glm4_moe", "mistral"])
def test_a_window_counts_where_the_model_makes_a_mask_of_it(family):
    """A config may carry a window that no layer uses."""
    wide, narrow = tiny(family), tiny(family)
    narrow.config.sliding_window = 16
    whole, less = (size(model).forward([TOKENS], 0) for model in (wide, narrow))
    assert less < whole if family == "mistral" else less == whole


def test_a_norm_with_a_weight_for_each_head_multiplies_no_matrix():
    assert size(tiny("cohere", use_qk_norm=True)) == size(tiny("cohere"))
