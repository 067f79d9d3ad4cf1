"""Which kernel runs: by the device of the tensors, and with the boundaries that came with the call."""

import functools
import importlib
import inspect

import pytest
import recurrences
import torch
import torch.nn.functional as F
from packed_models import alone, assert_same, built, packed, tokens

from posttrain.models.gdn_packing import boundaries, patch
from posttrain.models.packed import dispatch

DELTA_NET_FUNCTIONS = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
)


@pytest.fixture
def module():
    """The modeling module of dense qwen3_5, patched, to be broken with monkeypatch."""
    built("qwen3_5")
    return importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")


def bound_at_import(raw, implementation):
    """What transformers makes of a torch function and a package: the kernel is fixed at import."""
    applicable = tuple(inspect.signature(implementation).parameters)

    @functools.wraps(raw)
    def wrapped(*args, **kwargs):
        return implementation(*args, **{k: v for k, v in kwargs.items() if k in applicable})

    return wrapped


@pytest.mark.parametrize("with_kernels_package", [False, True])
@torch.no_grad()
def test_a_gpu_kernel_bound_on_a_machine_without_gpu(module, monkeypatch, with_kernels_package):
    """triton and fla importable, no driver: upstream dies in the first forward; patched, it runs."""

    def no_driver(q, k, v, g, beta, cu_seqlens=None, **kwargs):
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    model, ids, function = built("qwen3_5"), tokens(30), None
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        function = bound_at_import(inspect.unwrap(getattr(module, name)), no_driver)
        if with_kernels_package:  # wraps functions in modules

            def as_module(func):
                class Func(torch.nn.Module):
                    def forward(self, *args, **kwargs):
                        return func(*args, **kwargs)

                return Func()

            function = as_module(function)
        monkeypatch.setattr(module, name, function)
    with pytest.raises(RuntimeError, match="0 active drivers"):
        model(input_ids=ids[None], use_cache=False)
    patch(model)
    assert_same(packed(model, ids, (13, 17)), alone(model, ids, (13, 17)))
    model.generate(ids[None], max_new_tokens=3, do_sample=False)
    on_gpu = module.torch_chunk_gated_delta_rule.kernel_for(torch.device("cuda"))
    assert on_gpu is no_driver and module.torch_chunk_gated_delta_rule.kernel_for(torch.device("cpu")) is None


@pytest.mark.parametrize("convolution", ["causal_conv1d", "fla"])
@torch.no_grad()
def test_fused_kernels_receive_the_boundaries(module, monkeypatch, convolution):
    """Kernels of the real signatures, written as loops over documents, run where `FUSED_ON` says."""
    calls = []

    def chunk_gated_delta_rule(
        q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None,
    ):  # fmt: skip
        calls.append("delta rule")
        assert use_qk_l2norm_in_kernel and scale is None and initial_state is None
        if cu_seqlens is None:
            return torch.stack([recurrences.delta_rule(*row) for row in zip(q, k, v, g, beta, strict=True)]), None
        assert cu_seqlens.tolist() == cu_seqlens_cpu.tolist()
        lengths = cu_seqlens.diff().tolist()
        documents = zip(*(x[0].split(lengths) for x in (q, k, v, g, beta)), strict=True)
        return torch.cat([recurrences.delta_rule(*document) for document in documents])[None], None

    def conv(x, weight, bias, lengths, activation):
        parts = [F.conv1d(F.pad(p, (3, 0)), weight[:, None], bias, groups=len(weight)) for p in x.split(lengths, -1)]
        return F.silu(torch.cat(parts, -1)) if activation == "silu" else torch.cat(parts, -1)

    def causal_conv1d_fn(
        x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False,
        final_states_out=None, activation=None,
    ):  # fmt: skip
        calls.append("convolution")
        if seq_idx is None:
            return conv(x, weight, bias, [x.shape[-1]], activation)
        assert x.stride(1) == 1 and seq_idx.dtype == torch.int32 and seq_idx.shape == (1, x.shape[-1])
        return conv(x, weight, bias, torch.unique_consecutive(seq_idx, return_counts=True)[1].tolist(), activation)

    def fla_causal_conv1d(x, weight=None, bias=None, activation=None, cu_seqlens=None, cu_seqlens_cpu=None):
        calls.append("convolution")
        lengths = [x.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
        return conv(x.transpose(1, 2), weight, bias, lengths, activation).transpose(1, 2), None

    fla_causal_conv1d.__module__ = "fla.modules.causal_conv1d"
    raw = {name: inspect.unwrap(getattr(module, name)) for name in DELTA_NET_FUNCTIONS}
    bound = {"torch_chunk_gated_delta_rule": chunk_gated_delta_rule}
    if convolution == "causal_conv1d":
        bound["causal_conv1d_fn"] = causal_conv1d_fn
    for name, function in raw.items():
        monkeypatch.setattr(module, name, bound_at_import(function, bound.get(name, function)))
    monkeypatch.setattr(dispatch, "fla_convolution", lambda: fla_causal_conv1d)
    model, ids = built("qwen3_5"), tokens(30)
    patch(model)
    expected = alone(model, ids, (13, 2, 15))
    assert not calls
    monkeypatch.setattr(dispatch, "FUSED_ON", {"cpu"})
    assert_same(packed(model, ids, (13, 2, 15)), expected)
    assert_same(alone(model, ids, (13, 2, 15)), expected)
    assert calls.count("delta rule") == calls.count("convolution") == 3 * (1 + 3)
    foreign = {k: v for k, v in boundaries((13, 2, 15), "cpu").items() if k != "document_lengths"}
    foreign["cu_seq_lens_q"] = torch.tensor([0, 13, 15, 30, 30], dtype=torch.int32)  # an empty document
    assert_same(model(input_ids=ids[None], **foreign).logits[0], expected)
    assert patch(model).kernels["gated_delta_rule"].endswith("chunk_gated_delta_rule")


def test_a_packed_row_with_a_state_is_refused_by_fused_kernels_too(module, monkeypatch):
    def chunk_gated_delta_rule(q, k, v, g, beta, initial_state=None, output_final_state=False, cu_seqlens=None):
        return v, None

    raw = inspect.unwrap(module.torch_chunk_gated_delta_rule)
    rule = dispatch.dispatch("torch_chunk_gated_delta_rule", bound_at_import(raw, chunk_gated_delta_rule))
    monkeypatch.setattr(dispatch, "FUSED_ON", {"cpu"})
    q, k, v = torch.randn(3, 1, 9, 2, 8)
    where = boundaries((4, 5), "cpu")
    assert rule(q, k, v, g=v[..., 0], beta=v[..., 0], **where)[0] is v
    for state in ({"output_final_state": True}, {"initial_state": torch.zeros(1, 2, 8, 8)}):
        with pytest.raises(ValueError, match="share a recurrent state"):
            rule(q, k, v, g=v[..., 0], beta=v[..., 0], **where, **state)


@pytest.mark.parametrize("sends_seq_idx", [True, False])
def test_fused_scans_receive_the_document_numbers(monkeypatch, sends_seq_idx):
    """Alone, and joined with the convolution; made from the lengths where the caller sent none."""
    seen = []

    def mamba_chunk_scan_combined(
        x, dt, A, B, C, chunk_size, seq_idx=None, initial_states=None, return_final_states=False
    ):
        seen.append(seq_idx)
        return x

    def mamba_split_conv1d_scan_combined(zxbcdt, weight, seq_idx=None):
        seen.append(seq_idx)
        return zxbcdt

    bamba = importlib.import_module("transformers.models.bamba.modeling_bamba")
    kernels = {
        "mamba2_chunk_scan": mamba_chunk_scan_combined,
        "mamba2_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
    }
    scan, both = (
        dispatch.dispatch(name, bound_at_import(inspect.unwrap(getattr(bamba, name)), kernel))
        for name, kernel in kernels.items()
    )
    monkeypatch.setattr(dispatch, "FUSED_ON", {"cpu"})
    where = boundaries((4, 1, 4), "cpu")
    if not sends_seq_idx:
        del where["seq_idx"]
    x, dt = torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2)
    scan(x, dt, torch.ones(2), x, x, chunk_size=4, **where)
    both(x.flatten(2), dt, **where)
    assert [numbers.tolist() for numbers in seen] == [[[0] * 4 + [1] + [2] * 4]] * 2
    assert all(numbers.dtype == torch.int32 for numbers in seen)
    with pytest.raises(ValueError, match="share a recurrent state"):
        scan(x, dt, torch.ones(2), x, x, chunk_size=4, return_final_states=True, **where)


def test_an_activation_that_the_fused_convolution_lacks_takes_the_reference(module, monkeypatch):
    def convolution(x, weight=None, bias=None, activation=None, cu_seqlens=None, cu_seqlens_cpu=None):
        raise AssertionError("it knows silu alone")

    convolution.__module__ = "fla.modules.causal_conv1d"
    raw = inspect.unwrap(module.causal_conv1d_fn)
    function = dispatch.dispatch("causal_conv1d_fn", raw)
    monkeypatch.setattr(dispatch, "fla_convolution", lambda: convolution)
    monkeypatch.setattr(dispatch, "FUSED_ON", {"cpu"})
    x, weight = torch.randn(1, 6, 9), torch.randn(6, 4)
    found = function(x, weight, None, activation="gelu", **boundaries((4, 5), "cpu"))
    parts = [F.conv1d(F.pad(part, (3, 0)), weight[:, None], groups=6) for part in x.split((4, 5), -1)]
    assert_same(found, F.gelu(torch.cat(parts, -1)), 1e-6)
    with pytest.raises(AssertionError, match="silu alone"):
        function(x, weight, None, activation="silu", **boundaries((4, 5), "cpu"))


def test_channels_are_last_where_the_fused_convolution_wants_them(module, monkeypatch):
    """causal-conv1d takes document numbers with no other layout; the values are the same."""
    seen = []

    def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):
        seen.append(x)
        return x

    function = dispatch.dispatch(
        "causal_conv1d_fn", bound_at_import(inspect.unwrap(module.causal_conv1d_fn), causal_conv1d_fn)
    )
    monkeypatch.setattr(dispatch, "FUSED_ON", {"cpu"})
    x = torch.randn(1, 6, 9)
    function(x, torch.randn(6, 4), None, activation="silu", **boundaries((4, 5), "cpu"))
    assert x.stride(1) == 9 and seen[0].stride(1) == 1 and torch.equal(seen[0], x)
