"""The probe on every kind of architecture: passes, refuses by name, and sees what other layers leak."""

import importlib

import pytest
import torch
from architecture_cases import ATTENTION_ONLY, KIMI, REFUSED, STATEFUL, known, patched
from packing_cases import merging, without_boundaries

from posttrain.errors import UserError
from posttrain.models.architectures import tiny
from posttrain.models.gdn_packing import PackingLeak, patch, verify
from posttrain.models.packed import dispatch, kernels
from posttrain.models.packed.boundaries import documents
from posttrain.models.packed.layers import carried


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", known([*STATEFUL, *ATTENTION_ONLY]))
def test_probe_passes(name, dtype):
    # Below the lengths at which some of them compute something else.
    proof = verify(patched(name), dtype=dtype, longest=0)
    assert proof.max_difference < proof.tolerance / 2
    assert proof.max_gradient_difference < proof.gradient_tolerance / 2


@pytest.mark.parametrize("name", known(REFUSED))
def test_what_cannot_be_right_is_refused_by_name(name):
    model = tiny(name)
    with pytest.raises(UserError, match=rf"packing=thd.*{REFUSED[name]}.*packing=padded"):
        patch(model)
        verify(model)
    patch(model, packed=False)  # chooses kernels only


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name, function, layer",
    [
        pytest.param("kimi_linear", "chunk_kimi_delta_attention", "KimiLinearDeltaAttention", marks=KIMI),
        pytest.param("kimi_linear", "causal_conv1d_fn", "KimiLinearDeltaAttention", marks=KIMI),
        ("bamba", "mamba2_chunk_scan", "BambaMixer"),
        ("bamba", "causal_conv1d_fn", "BambaMixer"),
        ("lfm2", "causal_conv1d_fn", "Lfm2ShortConv"),
        ("olmo_hybrid", "torch_chunk_gated_delta_rule", "OlmoHybridGatedDeltaNet"),
    ],
)
def test_probe_catches_boundaries_dropped_for_one_function(monkeypatch, name, function, layer, dtype):
    model = patched(name)
    module = importlib.import_module(type(model).__module__)
    monkeypatch.setattr(module, function, without_boundaries(getattr(module, function)))
    with pytest.raises(PackingLeak, match=rf"({layer} leaks|no boundaries reach .* of {layer}).*packing=padded"):
        verify(model, dtype=dtype)


@pytest.mark.parametrize("documents_kept_apart", [0, 4], ids=["none", "all_but_the_last_two"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", known([name for name, what in STATEFUL.items() if what == "Mamba-2"]))
def test_probe_catches_a_scan_that_ignores_its_boundaries(monkeypatch, name, dtype, documents_kept_apart):
    """They arrive, so counting them shows nothing; and the state is a small part of these layers' output."""
    model = patched(name)
    monkeypatch.setattr(kernels, "state_space_scan", merging(kernels.state_space_scan, documents_kept_apart))
    with pytest.raises(PackingLeak, match="leaks between documents"):
        verify(model, dtype=dtype)


def test_probe_wants_boundaries_at_every_stateful_layer(monkeypatch):
    """A convolution that happens to be right for these documents, but was never told of them."""
    model = patched("lfm2")
    module = importlib.import_module(type(model).__module__)

    def by_luck(x, weight, bias=None, activation=None, **kwargs):
        lengths = documents(kwargs, 1, x.shape[2]) or (x.shape[2],)
        return kernels.causal_conv1d(x, weight, bias, activation, lengths)

    by_luck.kernel_for = module.causal_conv1d_fn.kernel_for
    monkeypatch.setattr(module, "causal_conv1d_fn", by_luck)
    with pytest.raises(PackingLeak, match="no boundaries reach the convolution of Lfm2ShortConv"):
        verify(model)


@pytest.mark.parametrize("name", known(STATEFUL))
def test_every_stateful_layer_is_known(name):
    """By the functions of its file: each layer class that calls one of them carries what the function carries."""
    model = patched(name)
    found = set().union(*carried(model).values())
    module = importlib.import_module(type(model).__module__)
    offered = {what for f, operation in dispatch.OPERATIONS.items() if hasattr(module, f) for what in operation.carries}
    assert found == offered
