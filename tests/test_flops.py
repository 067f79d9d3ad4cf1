"""flops against torch's FLOP counter on running models, and against formulas in config fields."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from posttrain.flops import Chunk, PassCost, causal_pairs, counter, forward_flops, size
from posttrain.models import gdn_packing
from posttrain.models.architectures import tiny

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


@pytest.mark.parametrize("model_type", ["qwen3_5_moe", "gpt_oss", "deepseek_v3", "falcon_h1", "lfm2", "bert", "gemma2"])
def test_parts_sum_to_the_forward_pass(model_type):
    model, lengths = tiny(model_type), [33, 1, 500]
    parts = forward_flops(model, lengths, logit_positions=9)
    assert sum(parts.values()) == size(model).forward(lengths, 9)
    assert all(flops > 0 for flops in parts.values())
    assert sum(forward_flops(model, lengths).values()) == size(model).forward(lengths, sum(lengths))


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


@pytest.mark.parametrize("model_type", ["kimi_linear", "mamba2", "mamba", "falcon_h1", "lfm2", "dbrx", "bert"])
def test_training_all_weights_is_three_forward_passes(model_type):
    sized = size(tiny(model_type))
    assert sized.training([9, 30], 12) == 3 * sized.forward([9, 30], 12)


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


def test_causal_pairs_within_chunks():
    lengths = [0, 1, 4, 5, 6, 50]
    seen = [1 for n in lengths for query in range(n) for key in range(query + 1) if query // 5 == key // 5]
    assert causal_pairs(lengths, Chunk(5)) == len(seen)


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


@pytest.mark.parametrize(
    "model_type, named",
    [
        ("minimax", "known in MiniMaxDecoderLayer .MiniMaxLightningAttention"),
        ("diffllama", "DiffLlamaAttention has a lambda_q1"),
        ("deepseek_v32", "DeepseekV32Attention chooses its keys"),
        ("gemma3n_text", "Gemma3nTextAttention shares its keys"),
        ("inkling_text", "InklingAttention is attention of the kind 'hybrid_sliding'"),
        ("zamba2", "Zamba2MLP takes other weights in each layer"),
        ("zaya", "Conv1d in ZayaCCAProjection"),
        ("hrm_text", "HrmTextForCausalLM: 2 lists of 2 decoder layers, not one"),
        ("musicgen", "MusicgenForCausalLM: its LM head is a ModuleList"),
        ("recurrent_gemma", "known in .*RecurrentGemmaRecurrentBlock"),
    ],
)
def test_refuses_by_name_what_it_cannot_count(model_type, named):
    with pytest.raises(ValueError, match=named):
        size(tiny(model_type))


def test_refuses_cross_attention():
    config = AutoConfig.for_model("gpt2", n_embd=64, n_layer=2, n_head=4, add_cross_attention=True)
    with torch.device("meta"), pytest.raises(ValueError, match="GPT2LMHeadModel: cross-attention"):
        size(AutoModelForCausalLM.from_config(config))


def test_refuses_a_router_that_takes_two_whatever_it_says():
    model = tiny("phimoe")
    assert model.model.layers[0].mlp.top_k == 4
    with pytest.raises(ValueError, match="PhimoeSparseMoeBlock takes two experts"):
        size(model)


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4, 4))


def test_a_layer_that_runs_twice_is_billed_twice():
    model = build("llama")
    model.model.layers[3] = model.model.layers[0]
    assert len(list(model.model.layers.parameters())) < len(list(build("llama").model.layers.parameters()))
    assert size(model).forward([TOKENS], TOKENS) == counted(model) - counters_excess(model.config, TOKENS)


def test_refuses_an_unknown_matrix_and_reuse_in_unknown_places():
    odd = build("llama")
    odd.model.layers[2].mlp.extra = Bilinear()
    with pytest.raises(ValueError, match="model.layers.2.mlp.extra.table.*Bilinear"):
        size(odd)
    reused = build("llama")
    reused.model.adapter = reused.model.layers[0].mlp
    with pytest.raises(ValueError, match="LlamaMLP runs more than once"):
        size(reused)
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


class Adapted(nn.Module):
    """A frozen layer and the low-rank sum beside it."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def adapted(layers):
    model = build("llama", num_hidden_layers=layers).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        layer.mlp.down_proj = Adapted(layer.mlp.down_proj)
    return model


def test_adapters_are_billed_three_times_and_frozen_weights_twice():
    """By one layer more, since the first layer's frozen weights have no gradient to pass on."""
    three, four = adapted(3), adapted(4)
    width = 4 * 24
    frozen = 2 * (2 * 64 * width + 2 * 64 * 2 * 24 + 3 * 64 * 96)
    adapters = 2 * (64 * 4 + 4 * width + 96 * 4 + 4 * 64)
    core = 4 * width * TOKENS * (TOKENS + 1) // 2
    one_layer = size(four).training([TOKENS], TOKENS) - size(three).training([TOKENS], TOKENS)
    assert one_layer == TOKENS * (2 * frozen + 3 * adapters) + 3 * core
    seen = counted(four, backward=True) - counted(three, backward=True)
    assert one_layer == seen - 3 * counters_excess(four.config, TOKENS) / 4
    assert size(four).training_cost.per_logit == 2 * size(four).forward_cost.per_logit


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


def test_widths_in_nested_configs():
    model = tiny("dbrx")
    for block in model.transformer.blocks:
        block.ffn.top_k = 3
    ffn, hidden, layers = model.config.ffn_config, model.config.d_model, model.config.n_layers
    assert forward_flops(model, [TOKENS])["experts"] == layers * TOKENS * 6 * hidden * ffn.ffn_hidden_size * 3
    assert size(model).forward([TOKENS], TOKENS) == counter.count(model, [TOKENS])[0]


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


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@pytest.mark.parametrize("part", ["everything", "later layers"])
def test_hardware_counts_the_decoder_layers_again(family, part):
    """Not the embeddings, the head, or a layer that no gradient passes. Early stop would spare a last projection."""
    model = build(family, tie_word_embeddings=False)
    if part != "everything":
        trainable(part, model)
    plain = counted(model, backward=True)
    for n, layer in enumerate(model.model.layers):
        model.model.layers[n] = checkpoint_wrapper(layer)
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        again = counted(model, backward=True) - plain
    sized, layers = size(model), 4 if part == "everything" else 3
    again -= counters_excess(model.config, TOKENS) * layers / 4 if family == "llama" else 0
    recomputed = sized.hardware([TOKENS], TOKENS, True) - sized.training([TOKENS], TOKENS)
    if family == "gpt_oss":
        recomputed = sized.recomputed_cost.dense([TOKENS], TOKENS)
    assert recomputed == again > 0
    assert sized.hardware([TOKENS], TOKENS, False) == sized.training([TOKENS], TOKENS)
    assert sized.recomputed_cost.per_logit == 0


def test_an_empty_cost():
    assert PassCost()([5, 6], 7) == 0


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "glm4_moe", "mistral"])
def test_a_window_counts_where_the_model_makes_a_mask_of_it(family):
    """A config may carry a window that no layer uses."""
    wide, narrow = tiny(family), tiny(family)
    narrow.config.sliding_window = 16
    whole, less = (size(model).forward([TOKENS], 0) for model in (wide, narrow))
    assert less < whole if family == "mistral" else less == whole


def test_layers_beside_the_stack_and_copies_of_weights_are_refused():
    """Whether they run cannot be seen from the modules: layers that predict further tokens, an adapter's copies."""
    model = tiny("llama")
    layer = type(model.model.layers[0])
    model.model.mtp = nn.ModuleList([layer(model.config, 0)])
    with pytest.raises(ValueError, match="mtp.0: whether this LlamaDecoderLayer runs is not known"):
        size(model)
    model = tiny("llama")
    projection = model.model.layers[0].self_attn.q_proj
    projection.modules_to_save = nn.ModuleDict({"default": nn.Linear(8, 8)})
    with pytest.raises(ValueError, match="modules_to_save: whether"):
        size(model)
