"""flops.py against torch's FLOP counter on running models, and against formulas in config fields."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from posttrain.flops import causal_pairs, size

TOKENS = 70  # more than one chunk of the gated delta rule, and no multiple of it
CHUNK = 64
SHAPE = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
GATED_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4,
}  # fmt: skip
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_intermediate_size": 40,
}  # fmt: skip
FAMILIES = {
    "qwen3_5_text": GATED_DELTA,
    "qwen3_5_moe_text": GATED_DELTA | EXPERTS,
    "qwen3_next": GATED_DELTA | EXPERTS,
    "olmo_hybrid": GATED_DELTA,
    "qwen3": {},
    "qwen2": {},
    "llama": {},
    "qwen3_moe": EXPERTS,
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": LATENT,
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 16},
    "gemma2": {"sliding_window": 16},
    "gpt2": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
}
ATTENTION_ONLY = [family for family, fields in FAMILIES.items() if "linear_num_key_heads" not in fields]


def build(family, device="cpu", **fields):
    fields = SHAPE | FAMILIES.get(family, {}) | fields
    if family in ("gpt2", "opt", "deepseek_v3"):
        fields = {key: fields[key] for key in fields if key not in ("head_dim", "num_key_value_heads")}
    if family == "deepseek_v3":
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    config = AutoConfig.for_model(family, **fields)
    config._experts_implementation = "batched_mm"  # the counter does not see the grouped kernel
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def counted(model, backward=False, tokens=TOKENS, logits=0):
    """FlopCounterMode's total for one document; all positions have logits unless `logits` says how many."""
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
        out = model(torch.arange(tokens)[None] % 100, use_cache=False, logits_to_keep=logits)
        if backward:
            out.logits.sum().backward()
    return counter.get_total_flops()


def counters_excess(config, tokens):
    """What FlopCounterMode counts in a forward pass beyond the useful FLOPs, from config fields.

    Attention of every query to every key, also those masked; the chunked algorithm of the gated delta rule
    (its triangular solves are not counted); the convolution's outputs beyond the last token.
    """
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    heads = config.num_attention_heads
    if hasattr(config, "v_head_dim"):
        width = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) / 2
    else:
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    excess = 0
    for kind in kinds:
        if kind == "linear_attention":
            hv, dk, dv = (
                config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
            )  # fmt: skip
            channels, taps = 2 * config.linear_num_key_heads * dk + hv * dv, config.linear_conv_kernel_dim
            padded = -(-tokens // CHUNK) * CHUNK
            excess += hv * padded * (4 * CHUNK * dk + 2 * CHUNK * dv + 6 * dk * dv)
            excess -= hv * tokens * 6 * dk * dv
            excess += 2 * taps * channels * (taps - 1)
        else:
            window = config.sliding_window if kind == "sliding_attention" else tokens
            seen = sum(min(position, window) for position in range(1, tokens + 1))
            excess += 4 * width * (tokens**2 - seen)
    return excess


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


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
def test_training_is_three_forward_passes(family):
    # The counter is wrong about the backward pass of a depthwise convolution: there is no comparing with it.
    counter = size(build(family))
    assert counter.training([9, 30], 12) == 3 * counter.forward([9, 30], 12)


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "qwen3_next"])
def test_lm_head_is_billed_for_positions_with_logits(family):
    model = build(family)
    expected = counted(model, logits=5) - counters_excess(model.config, TOKENS)
    assert size(model).forward([TOKENS], 5) == expected


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_tied_head_is_counted_once(family):
    tied, untied = (build(family, tie_word_embeddings=tie) for tie in (True, False))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert size(tied) == size(untied)


def trainable(name, model):
    """Freeze a model but for what comes after its first layer, the norms, one MLP, the head, or nothing."""
    keep = {
        "later layers": lambda n: not n.startswith(("model.embed_tokens", "model.layers.0.")),
        "norms": lambda n: "norm" in n,
        "one mlp": lambda n: n.startswith("model.layers.2.mlp.down_proj"),
        "head": lambda n: n.startswith("lm_head"),
        "nothing": lambda n: False,
    }[name]
    for key, weight in model.named_parameters():
        weight.requires_grad_(keep(key))
    return model


PARTS = ["later layers", "norms", "one mlp", "head", "nothing"]
CASES = [("llama", part) for part in PARTS] + [("qwen3_moe", part) for part in PARTS if part != "one mlp"]


@pytest.mark.parametrize("family, part", CASES)
def test_frozen_weights_are_billed_for_what_passes_through_them(family, part):
    model = trainable(part, build(family, tie_word_embeddings=False))
    # The core's backward pass runs where a gradient reaches it: the masked pairs count as the useful ones do.
    layers = {"later layers": 3, "norms": 4, "one mlp": 1, "head": 0, "nothing": 0}[part]
    per_layer = counters_excess(model.config, TOKENS) / 4
    expected = counted(model, backward=part != "nothing") - per_layer * (4 + 2 * layers)
    assert size(model).training([TOKENS], TOKENS) == expected


def test_all_but_norms_frozen_is_twice_the_forward_weights():
    counter = size(trainable("norms", build("llama", tie_word_embeddings=False)))
    assert counter.training_cost.per_token == 2 * counter.forward_cost.per_token
    assert counter.training_cost.per_logit == 2 * counter.forward_cost.per_logit


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_moe_text", "gpt_oss"])
def test_packed_documents_are_billed_each_on_its_own(family):
    counter, lengths = size(build(family, device="meta")), [1, 33, 500, 7]
    alone = sum(counter.forward([length], length) for length in lengths)
    assert counter.forward(lengths, sum(lengths)) == alone
    assert counter.forward([sum(lengths)], sum(lengths)) > alone


@pytest.mark.parametrize("window", [None, 1, 5, 1000])
def test_causal_pairs(window):
    lengths = [0, 1, 4, 5, 6, 50]
    seen = [
        1 for length in lengths for query in range(length) for key in range(length)
        if key <= query and (window is None or query - key < window)
    ]  # fmt: skip
    assert causal_pairs(lengths, window) == len(seen)


def test_rollout_feeds_all_but_the_last_token():
    counter = size(build("qwen3", device="meta"))
    alone = counter.rollout([(10, [4]), (3, [1])])
    assert alone == pytest.approx(counter.forward([13, 3], 5))
    shared = counter.rollout([(10, [4, 4])])  # the prompt and its last position's logits are computed once
    assert shared == pytest.approx(2 * counter.rollout([(10, [4])]) - counter.forward([10], 1))


def test_rollout_against_the_counter_around_the_sampler():
    from posttrain.config import RolloutConf
    from posttrain.models.tiny import tiny_config
    from posttrain.records import Problem
    from posttrain.rollout.local import generate

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3_dense"), attn_implementation="eager").eval()
    problems = [(n, Problem(n, tuple(range(1, 31)), "")) for n in range(3)]
    cfg = RolloutConf(group_size=4, max_new_tokens=5)
    with FlopCounterMode(display=False) as seen:
        rollouts = generate(model, problems, cfg, key=(0,), end_ids=[], pad_id=0)
    assert [len(rollout.completion_ids) for rollout in rollouts] == [5] * 12
    per_pair = 4 * 4 * 32 * 4  # 2 for each of query-key and weight-value, 4 heads of 32, 4 layers
    above_the_diagonal = 3 * per_pair * (30 * 30 - 30 * 31 // 2)  # the counter takes the prefill for dense
    wanted = size(model).rollout([(30, [5] * 4)] * 3) + above_the_diagonal
    assert seen.get_total_flops() == pytest.approx(wanted, rel=1e-9)


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
    """A process group of four ranks, of which three are imaginary: enough to shard, not to communicate."""
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


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    "family, fields, named",
    [
        ("mamba", {}, "MambaMixer"),
        ("mamba2", {"num_heads": 16, "head_dim": 8, "n_groups": 1}, "Mamba2Mixer"),
        ("bloom", {}, "BloomBlock"),
        ("gpt2", HEADS | {"add_cross_attention": True}, "GPT2LMHeadModel: cross-attention"),
        ("minimax", HEADS | {"num_local_experts": 4}, "MiniMaxDecoderLayer"),
        ("diffllama", HEADS, "DiffLlamaAttention"),
        ("llama4_text", HEADS | {"num_local_experts": 2}, "Llama4TextAttention.*chunked"),
    ],
)
def test_refuses_by_name_what_it_cannot_count(family, fields, named):
    fields = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "pad_token_id": 0} | fields
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))
    with pytest.raises(ValueError, match=named):
        size(model)


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4, 4))


def test_refuses_an_unknown_matrix_and_a_layer_that_runs_twice():
    odd = build("llama")
    odd.model.layers[2].mlp.extra = Bilinear()
    with pytest.raises(ValueError, match="model.layers.2.mlp.extra.table.*Bilinear"):
        size(odd)
    looped = build("llama")
    looped.model.layers[3] = looped.model.layers[0]
    with pytest.raises(ValueError, match="more than once"):
        size(looped)
    headless = build("llama")
    headless.lm_head = nn.Identity()
    with pytest.raises(ValueError, match="Identity"):
        size(headless)


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
