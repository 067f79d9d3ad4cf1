"""Tiny models of every architecture: the layer classes of the real one, and sizes that a laptop does not notice."""

import functools

import pytest
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, LlamaConfig, LlamaForCausalLM

from posttrain.models.architectures import architectures, default_config, tiny
from posttrain.models.shrink import shrunk, tiny_copy

SAMPLE = """
qwen3_5_text qwen3_5_moe_text qwen3_next olmo_hybrid kimi_linear bailing_hybrid nemotron_h bamba falcon_h1
granitemoehybrid lfm2 lfm2_moe zamba2 jamba recurrent_gemma gemma3_text gemma3n_text gemma4_text gpt_oss deepseek_v3
llama llama4_text mixtral qwen2_moe ernie4_5_moe longcat_flash dbrx gpt2 falcon opt bart
""".split()
SAMPLE = [name for name in SAMPLE if name in architectures()]  # not all are in older versions of transformers
NEEDS_ANOTHER_MODEL = {"gemma4_assistant", "gemma4_unified_assistant"}  # drafts from the states of a larger model
NOT_PLAIN_TEXT = {"musicgen", "musicgen_melody"}  # several codebooks a position


built = functools.cache(tiny)


def real(model_type):
    """The default model in its own size, without memory."""
    config = default_config(model_type)
    with torch.device("meta"):
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(config)


def classes(model):
    return {type(module) for module in model.modules()}


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_layer_of_each_kind_in_little_memory(model_type):
    small, big = built(model_type), real(model_type)
    assert classes(small) == classes(big)
    assert sum(p.numel() for p in small.parameters()) * 4 < 30e6
    assert sum(p.numel() for p in big.parameters()) > 20 * sum(p.numel() for p in small.parameters())


@pytest.mark.parametrize("model_type", SAMPLE)
@torch.no_grad()
def test_it_runs_and_what_a_token_says_arrives_later(model_type):
    model = built(model_type)
    ids = torch.arange(2 * 40).view(2, 40) % 60
    ids[1, 1:] = ids[0, 1:]  # two rows that differ in their first token only
    first, second = model(input_ids=ids, use_cache=False).logits
    assert first.isfinite().all()
    assert (first - second)[-1].abs().max() > 1e-4 * first.abs().max()


def test_the_same_weights_each_time_and_the_generator_left_alone():
    state = torch.get_rng_state()
    one, other = tiny("qwen3_5").state_dict(), tiny("qwen3_5").state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert all((value == -5).all() for name, value in one.items() if name.endswith("A_log"))


@pytest.mark.parametrize(
    "model_type, wanted",
    [
        ("deepseek_v3", dict(num_hidden_layers=2, first_k_dense_replace=1, n_group=1, topk_group=1)),
        ("mixtral", dict(num_local_experts=4, num_experts_per_tok=4, num_key_value_heads=1, num_attention_heads=2)),
        ("gemma3_text", dict(layer_types=["sliding_attention", "full_attention"], sliding_window=32, head_dim=256)),
        ("gemma3n_text", dict(num_hidden_layers=6, num_kv_shared_layers=2)),
        ("llama4_text", dict(no_rope_layers=[1, 0], moe_layers=[0, 1])),
        ("lfm2", dict(layer_types=["conv", "full_attention"], full_attn_idxs=[1])),
        ("bamba", dict(attn_layer_indices=[1], mamba_d_head=64, mamba_d_state=256, mamba_n_heads=8)),
        ("nemotron_h", dict(mamba_head_dim=64, mamba_num_heads=2, n_groups=2, ssm_state_size=128)),
        ("zamba", dict(num_hidden_layers=3)),
        ("deepseek_v2", dict(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, kv_lora_rank=32)),
    ],
)
def test_what_is_kept_and_what_is_small(model_type, wanted):
    config = default_config(model_type)
    before = config.to_dict()
    small = shrunk(config)
    assert {name: getattr(small, name) for name in wanted} == wanted
    assert config.to_dict() == before


def test_fields_of_single_layers_follow_their_layers():
    """Gemma 4's full attention has wider heads than its sliding one."""
    config = default_config("gemma4_text")
    widths = [config.per_layer_config[i].head_dim for i in (0, config.layer_types.index("full_attention"))]
    small = shrunk(config)
    assert small.layer_types == ["sliding_attention", "full_attention"]
    assert [layer.head_dim for layer in small.per_layer_config] == widths and widths[0] < widths[1]
    assert [layer.num_attention_heads for layer in small.per_layer_config] == [2, 2]


class DeepOnly(LlamaForCausalLM):
    def __init__(self, config):
        if config.num_hidden_layers < 4:
            raise ValueError("four layers at least")
        super().__init__(config)


class Renamed(torch.nn.Identity):
    layer_idx = 0


class OneMoreLayer(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.extra = Renamed() if config.num_hidden_layers > 3 else None


@pytest.mark.parametrize("model_class, copied", [(LlamaForCausalLM, True), (DeepOnly, False), (OneMoreLayer, False)])
def test_a_copy_of_other_layers_is_no_copy(model_class, copied):
    with torch.device("meta"):
        model = model_class(LlamaConfig(num_hidden_layers=4))
    small = tiny_copy(model, torch.device("cpu"), torch.bfloat16)
    assert (small is not None) == copied
    if copied:
        assert small.dtype == torch.bfloat16 and small.config.head_dim == model.config.head_dim


def test_an_unknown_architecture():
    assert len(architectures()) > 150 and {"qwen3_5", "llama"} < set(architectures())
    with pytest.raises(KeyError):
        tiny("qwen35")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(set(architectures()) - NEEDS_ANOTHER_MODEL - NOT_PLAIN_TEXT))
@torch.no_grad()
def test_every_architecture(model_type):
    logits = tiny(model_type)(input_ids=torch.arange(40)[None] % 60, use_cache=False).logits
    assert logits.isfinite().all()
