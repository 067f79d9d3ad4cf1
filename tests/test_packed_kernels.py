"""The reference kernels against recurrences written out token by token, one document at a time."""

import importlib
import inspect

import pytest
import torch
import torch.nn.functional as F

from posttrain.models.architectures import architectures
from posttrain.models.packed import kernels

LENGTHS = [(1, 2, 13, 17, 64, 65), (1,) * 64, (130, 1, 5), (3, 3, 3, 3), (700, 5, 9, 300, 1, 1, 33, 999)]
SHORT = LENGTHS[0]


def raw(architecture, function):
    module = importlib.import_module(f"transformers.models.{architecture}.modeling_{architecture}")
    return inspect.unwrap(getattr(module, function))


def kimi(q, k, v, g, beta):
    """[L, H, K] ... of one document: S <- Diag(e^g) S + k (beta (v - S^T k))^T; o = S^T q / sqrt(K)."""
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    state, outputs = q.new_zeros(q.shape[1], q.shape[2], v.shape[2]), []
    for t in range(len(q)):
        state = state * g[t].exp()[..., None]
        recalled = torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * (v[t] - recalled))
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]) * q.shape[-1] ** -0.5)
    return torch.stack(outputs)


def mamba2(x, dt, B, C, A, D):
    """x [L, H, V], dt [L, H], B and C [L, G, S] of one document: S <- e^(dt A) S + dt x B^T; y = S C + D x."""
    heads = x.shape[1] // B.shape[1]
    state, outputs = x.new_zeros(x.shape[1], x.shape[2], B.shape[2]), []
    for t in range(len(x)):
        step = F.softplus(dt[t])
        into, out_of = (y[t].repeat_interleave(heads, 0) for y in (B, C))
        state = state * (step * A).exp()[:, None, None] + torch.einsum("hv,hs->hvs", step[:, None] * x[t], into)
        outputs.append(torch.einsum("hvs,hs->hv", state, out_of) + D[:, None] * x[t])
    return torch.stack(outputs)


def made(total, *shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, total, *shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def kimi_inputs(total, dtype=torch.float32):
    q, k, v = made(total, *[(2, 8)] * 3, dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    g = (-0.05 * torch.rand(1, total, 2, 8, generator=generator)).requires_grad_()
    return [q, k, v, g, torch.rand(1, total, 2, generator=generator).to(dtype).requires_grad_()]


A, D = torch.tensor([-0.05, -0.1, -0.02, -0.5]), torch.tensor([1.0, -0.5, 0.3, 0.0])


def scan_inputs(total, dtype=torch.float32):
    return made(total, (4, 8), (4,), (2, 8), (2, 8), dtype=dtype)


def kimi_kernel(lengths, *inputs):
    rule = raw("kimi_linear", "chunk_kimi_delta_attention")
    return kernels.delta_rule(rule, *inputs, lengths=lengths, use_qk_l2norm_in_kernel=True)[0]


def scan_kernel(lengths, x, dt, B, C):
    scan = raw("bamba", "mamba2_chunk_scan")
    return kernels.state_space_scan(scan, x, dt, A, B, C, 256, lengths, D=D, dt_softplus=True)


CASES = {
    **({"kimi": (kimi_kernel, kimi, kimi_inputs)} if "kimi_linear" in architectures() else {}),  # from 5.17 on
    "mamba2": (scan_kernel, lambda *a: mamba2(*a, A.to(a[0]), D.to(a[0])), scan_inputs),
}


def by_document(recurrence, lengths, inputs):
    documents = zip(*(x[0].split(lengths) for x in inputs), strict=True)
    return torch.cat([recurrence(*document) for document in documents])[None]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_recurrence(case, lengths):
    kernel, recurrence, inputs = CASES[case]
    row = inputs(sum(lengths))
    found, wanted = kernel(lengths, *row), by_document(recurrence, lengths, row)
    scale = wanted.detach().abs().max()
    assert (found - wanted).abs().max() < 1e-5 * scale
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(3))
    pairs = zip(*(torch.autograd.grad((x * weights).sum(), row) for x in (found, wanted)), strict=True)
    for one, other in pairs:
        assert (one - other).abs().max() <= 2e-5 * other.abs().max()


@pytest.mark.parametrize("case", CASES)
def test_bf16_rounds_inputs_and_output_only(case):
    """The state is fp32 inside."""
    kernel, recurrence, inputs = CASES[case]
    row = inputs(sum(SHORT), torch.bfloat16)
    found = kernel(SHORT, *row).double()
    wanted = by_document(recurrence, SHORT, [x.double() for x in row])
    assert (found - wanted).abs().max() < 2**-7 * wanted.abs().max()


@pytest.mark.parametrize("case", CASES)
def test_a_neighbour_that_is_not_a_number_stays_alone(case):
    kernel, _, inputs = CASES[case]
    row = [x.detach() for x in inputs(30)]
    row[0][0, :13] = float("nan")
    found = kernel((13, 17), *row)
    assert found[0, :13].isnan().any() and found[0, 13:].isfinite().all()


@pytest.mark.parametrize("layout", ["channels last", "tokens last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("lengths", LENGTHS[:4], ids=str)
def test_convolution_equals_each_document(lengths, dtype, layout):
    generator, total = torch.Generator().manual_seed(0), sum(lengths)
    x = torch.randn(1, total, 6, generator=generator).transpose(1, 2).to(dtype)
    x = (x.contiguous() if layout == "tokens last" else x).requires_grad_()
    weight, bias = torch.randn(6, 4, generator=generator).to(dtype), torch.randn(6, generator=generator).to(dtype)
    weight.requires_grad_(), bias.requires_grad_()
    found = kernels.causal_conv1d(x, weight, bias, "silu", lengths)
    assert found.dtype == dtype
    x64, w64, b64 = (y.detach().double().requires_grad_() for y in (x, weight, bias))
    parts = [F.conv1d(F.pad(part, (3, 0)), w64[:, None], b64, groups=6) for part in x64.split(lengths, dim=-1)]
    wanted = F.silu(torch.cat(parts, -1))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float64: 1e-12}[dtype]
    assert (found.double() - wanted).abs().max() < tolerance * wanted.abs().max()
    pairs = zip(
        torch.autograd.grad(found.square().sum(), (x, weight, bias)),
        torch.autograd.grad(wanted.square().sum(), (x64, w64, b64)),
        strict=True,
    )
    for one, other in pairs:
        assert (one.double() - other).abs().max() < 2 * tolerance * other.abs().max()


def test_convolution_beside_a_neighbour_that_is_not_a_number():
    x = torch.randn(1, 6, 30)
    x[..., :13] = float("nan")
    x.requires_grad_()
    found = kernels.causal_conv1d(x, torch.randn(6, 4), None, "silu", (13, 17))
    assert found[..., 13:].isfinite().all()
    (gradient,) = torch.autograd.grad(found[..., 13:].sum(), x)
    assert gradient[..., 13:].isfinite().all()


@pytest.mark.parametrize("state", [{"initial_states": torch.zeros(1, 4, 8, 8)}, {"return_final_states": True}])
def test_packed_documents_have_no_common_scan_state(state):
    scan, (x, dt, B, C) = raw("bamba", "mamba2_chunk_scan"), scan_inputs(9)
    with pytest.raises(ValueError, match="share a recurrent state"):
        kernels.state_space_scan(scan, x, dt, A, B, C, 256, (4, 5), **state)
