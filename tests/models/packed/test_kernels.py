"""The reference kernels against recurrences written out token by token, one document at a time."""

import importlib
import inspect

import pytest
import recurrences
import torch
import torch.nn.functional as F
from packed_models import assert_same, built
from packing_cases import LENGTHS, MIXED, UNEVEN

from posttrain.models.architectures import architectures
from posttrain.models.packed import kernels


@pytest.fixture
def module():
    """The modeling module of dense qwen3_5, patched, to be broken with monkeypatch."""
    built("qwen3_5")
    return importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")


def raw(architecture, function):
    module = importlib.import_module(f"transformers.models.{architecture}.modeling_{architecture}")
    return inspect.unwrap(getattr(module, function))


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


CASES = {"mamba2": (scan_kernel, lambda *a: recurrences.mamba2(*a, A.to(a[0]), D.to(a[0])), scan_inputs)}
if "kimi_linear" in architectures():  # from transformers 5.17 on
    CASES["kimi"] = (kimi_kernel, recurrences.kimi, kimi_inputs)


def by_document(recurrence, lengths, inputs):
    documents = zip(*(x[0].split(lengths) for x in inputs), strict=True)
    return torch.cat([recurrence(*document) for document in documents])[None]


@pytest.mark.parametrize("lengths", [*LENGTHS.values(), UNEVEN], ids=[*LENGTHS, "uneven"])
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
    row = inputs(sum(MIXED), torch.bfloat16)
    found = kernel(MIXED, *row).double()
    wanted = by_document(recurrence, MIXED, [x.double() for x in row])
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
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
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


def delta_rule_inputs(total, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, total, 4, 16, generator=generator) for _ in range(3))
    g = -0.05 * torch.rand(1, total, 4, generator=generator)
    beta = torch.rand(1, total, 4, generator=generator)
    return [x.to(dtype).requires_grad_() for x in (q, k, v)] + [
        g.requires_grad_(),
        beta.to(dtype).requires_grad_(),
    ]


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_reference_delta_rule_equals_the_recurrence(module, lengths):
    q, k, v, g, beta = inputs = delta_rule_inputs(sum(lengths))
    rule = module.torch_chunk_gated_delta_rule
    out, state = rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, document_lengths=lengths)
    documents = zip(*(x[0].split(lengths) for x in inputs), strict=True)
    expected = torch.cat([recurrences.delta_rule(*document) for document in documents])[None]
    assert state is None
    assert_same(out, expected, 1e-5)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    found, wanted = (torch.autograd.grad((x * weights).sum(), inputs) for x in (out, expected))
    for one, other in zip(found, wanted, strict=True):
        assert_same(one, other, 2e-5)


def test_reference_delta_rule_in_bf16(module):
    """The state is fp32 inside: the error comes from rounding inputs and output, not of 65 rounded steps."""
    q, k, v, g, beta = inputs = delta_rule_inputs(sum(MIXED), torch.bfloat16)
    rule = module.torch_chunk_gated_delta_rule
    out, _ = rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, document_lengths=MIXED)
    documents = zip(*(x[0].double().split(MIXED) for x in inputs), strict=True)
    assert out.dtype == torch.bfloat16
    assert_same(out.double(), torch.cat([recurrences.delta_rule(*d) for d in documents])[None], 2**-7)


def test_packed_documents_have_no_common_state(module):
    q, k, v, g, beta = delta_rule_inputs(9)
    for state in ({"output_final_state": True}, {"initial_state": torch.zeros(1, 4, 16, 16)}):
        with pytest.raises(ValueError, match="share a recurrent state"):
            module.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, document_lengths=(4, 5), **state)


@pytest.mark.parametrize("width", [2, 4, 7])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("contiguous", [False, True])
def test_reference_convolution_equals_each_document(module, width, with_bias, contiguous):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, sum(MIXED), 6, generator=generator).transpose(1, 2)
    x = (x.contiguous() if contiguous else x).requires_grad_()
    weight = torch.randn(6, width, generator=generator, requires_grad=True)
    bias = torch.randn(6, generator=generator, requires_grad=True) if with_bias else None
    out = module.causal_conv1d_fn(x, weight, bias, activation="silu", document_lengths=MIXED)
    expected = torch.cat(
        [
            F.silu(F.conv1d(F.pad(part, (width - 1, 0)), weight[:, None], bias, groups=6))
            for part in x.split(MIXED, dim=-1)
        ],
        dim=-1,
    )
    assert out.shape == x.shape
    assert_same(out, expected, 1e-6)
    inputs = [x, weight] + [bias] * with_bias
    found, wanted = (torch.autograd.grad(y.square().sum(), inputs) for y in (out, expected))
    for one, other in zip(found, wanted, strict=True):
        assert_same(one, other, 1e-5)


def test_calls_without_boundaries_are_upstreams_own(module):
    q, k, v, g, beta = delta_rule_inputs(2 * 40)
    batch = [x.detach().view(2, 40, *x.shape[2:]) for x in (q, k, v)]
    rates = dict(g=g.detach().view(2, 40, 4), beta=beta.detach().view(2, 40, 4))
    ours = module.torch_chunk_gated_delta_rule
    for one, other in zip(
        ours(*batch, **rates, output_final_state=True),
        inspect.unwrap(ours)(*batch, **rates, output_final_state=True),
        strict=True,
    ):
        assert torch.equal(one, other)
