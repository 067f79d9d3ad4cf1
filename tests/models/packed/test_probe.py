"""The probe sees every way of breaking a packed row of the Qwen hybrids, and names the layer at fault."""

import importlib

import pytest
import torch
from packed_models import CONFIGS, HYBRIDS, build, built
from packing_cases import Smear, with_leaking_gradient, with_stale_boundaries, without_boundaries
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen3_5TextConfig

from posttrain.errors import UserError
from posttrain.models import gdn_packing, shrink
from posttrain.models.gdn_packing import PackingLeak, verify
from posttrain.models.packed import dispatch
from posttrain.models.packed.boundaries import BOUNDARIES


@pytest.fixture
def module():
    """The modeling module of dense qwen3_5, patched, to be broken with monkeypatch."""
    built("qwen3_5")
    return importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_probe_passes_quickly_and_leaves_no_trace(name, dtype):
    model = built(name)
    torch.manual_seed(7)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    config, random_state = model.config.to_dict(), torch.get_rng_state()
    proof = verify(model, dtype=dtype)
    assert torch.equal(torch.get_rng_state(), random_state) and model.config.to_dict() == config
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert proof.max_difference < proof.tolerance / 2
    assert proof.max_gradient_difference < proof.gradient_tolerance / 2
    assert sum(proof.layers.values()) == 4 and proof.kernels["attention"] == "sdpa by document"


def test_probe_keeps_the_head_widths_of_a_real_model():
    """Qwen3.5's own config, never allocated: the copy is thin, its kernels have the real shapes."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(num_hidden_layers=4))
    small = shrink.shrunk(model.config)
    assert small.layer_types == ["linear_attention", "full_attention"]
    for width in ("head_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"):
        assert getattr(small, width) == getattr(model.config, width)
    assert small.linear_num_value_heads == 2 * small.linear_num_key_heads
    assert small.num_attention_heads == 2 * small.num_key_value_heads


def not_a_number(function):
    def broken(*args, **kwargs):
        return function(*args, **kwargs) * float("nan")

    broken.kernel_for = function.kernel_for
    return broken


def that_fails(function):
    def broken(*args, **kwargs):
        raise RuntimeError("seq_idx must have shape (batch_size, seqlen)")

    broken.kernel_for = function.kernel_for
    return broken


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["causal_conv1d_fn", "torch_chunk_gated_delta_rule"])
@pytest.mark.parametrize("breaks", [without_boundaries, with_stale_boundaries])
@pytest.mark.parametrize("name", HYBRIDS)
def test_probe_catches(monkeypatch, name, kernel, breaks, dtype):
    layer = next(layer for layer in built(name).modules() if hasattr(layer, "A_log"))
    module = importlib.import_module(type(layer).__module__)
    monkeypatch.setattr(module, kernel, breaks(getattr(module, kernel)))
    with pytest.raises(PackingLeak, match=rf"{type(layer).__name__} leaks.*packing=padded") as failure:
        verify(built(name), dtype=dtype)
    assert isinstance(failure.value, UserError) and "\n" not in str(failure.value)
    if breaks is with_stale_boundaries:
        assert "a packed row changes the row after it" in str(failure.value)


@pytest.mark.parametrize("breaks", [with_leaking_gradient, not_a_number, that_fails])
def test_probe_catches_in_one_kernel(module, monkeypatch, breaks):
    monkeypatch.setattr(module, "causal_conv1d_fn", breaks(module.causal_conv1d_fn))
    with pytest.raises(PackingLeak, match=r"Qwen3_5GatedDeltaNet .*packing=padded"):
        verify(built("qwen3_5"))


@pytest.mark.parametrize("name", ["qwen3_5", "llama"])
def test_probe_catches_attention_across_documents(monkeypatch, name):
    """What an all-ones mask or lost boundaries do: plain causal attention over the row."""
    genuine = AttentionInterface._global_mapping["sdpa"]

    def without_documents(*args, **kwargs):
        return genuine(*args, **{k: v for k, v in kwargs.items() if k not in BOUNDARIES})

    without_documents.by_document = True  # so that nobody mends it
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", without_documents)
    with pytest.raises(PackingLeak, match="Attention leaks between documents"):
        verify(built(name))


def test_probe_names_the_layer_whose_backward_leaks(module, monkeypatch):
    """Not the stateful layer below it, which the wrong gradient flows into."""
    rotate = module.apply_rotary_pos_emb
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, *rest: rotate(q, Smear.apply(k, -2), *rest))
    with pytest.raises(PackingLeak, match="Qwen3_5Attention leaks.*the gradient"):
        verify(built("qwen3_5"))


def test_probe_catches_a_gradient_in_a_neighbours_tokens(monkeypatch):
    """No parameter that is trained has a wrong gradient then: only the inputs show it."""
    model = build("llama")
    model.get_input_embeddings().requires_grad_(False)
    model.get_input_embeddings().register_forward_hook(lambda *call: call[2].requires_grad_())
    model.model.layers[0].register_forward_pre_hook(lambda _, args: (Smear.apply(args[0], 1), *args[1:]))
    monkeypatch.setattr(gdn_packing, "tiny_copy", lambda *_: model)
    with pytest.raises(PackingLeak, match="a document's loss has a gradient in its neighbours"):
        verify(model)


def test_probe_of_a_model_that_has_no_tiny_copy(monkeypatch):
    """The model itself is probed, forward only, and keeps its mode."""
    monkeypatch.setattr(gdn_packing, "tiny_copy", lambda *_: None)
    model = build("llama").train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5  # which would differ from call to call
    proof = verify(model, "cpu")
    assert model.training and proof.max_difference < 1e-5 and proof.max_gradient_difference is None
    assert "LlamaForCausalLM has no tiny copy" in proof.warnings[0] and "forward only" in proof.warnings[0]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_no_import_of_fla_for_the_cpu():
    """flash-linear-attention costs seconds to import; its convolution is looked up on a GPU only."""
    verify(built("qwen3_5"))
    assert dispatch.fla_convolution.cache_info().currsize == 0
