"""What is not understood is refused by name."""

import pytest
import torch
from flop_cases import build
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.flops import size
from posttrain.models.architectures import tiny


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
