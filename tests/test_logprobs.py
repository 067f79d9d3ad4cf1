"""Logprobs and entropies through chunks of the vocabulary: against all logits at once, in plain torch."""

import dataclasses

import logprob_ranks
import pytest
import torch
from logprob_cases import assert_close, gradients_of, row_of, small
from ranks import on_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain import logprobs
from posttrain.logprobs import linear_logprobs, token_logprobs
from posttrain.models.head import find_head

N, D, V = 37, 16, 1000
EACH = 4 * N  # bytes of one column of logits


@pytest.fixture(autouse=True)
def the_same_numbers_in_any_order():
    torch.manual_seed(0)


def tensors(dtype=torch.float32, loud=1.0, bias=True, seed=0):
    """hidden [1, N, D], weight [V, D], bias [V] with gradients, targets [1, N] and two gradients [1, N]."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, shift = (torch.randn(*shape, generator=generator) for shape in ((1, N, D), (V, D), (V,)))
    leaves = [(hidden * loud).to(dtype), weight.to(dtype), shift.to(dtype) if bias else None]
    leaves = [leaf if leaf is None else leaf.requires_grad_() for leaf in leaves]
    targets = torch.randint(V, (1, N), generator=generator)
    targets[0, :2] = torch.tensor([0, V - 1])
    return leaves, targets, torch.randn(2, 1, N, generator=generator)


def naive(hidden, weight, bias, targets, temperature=1.0, scale=1.0, cap=None):
    """All logits, in fp64."""
    x = nn.functional.linear(*(None if t is None else t.double() for t in (hidden, weight, bias)))
    y = (scale * x if cap is None else cap * torch.tanh(scale * x / cap)) / temperature
    p = torch.distributions.Categorical(logits=y)
    return p.log_prob(targets), p.entropy()


def gradients(values, weights, leaves):
    loss = sum((value * weight).sum() for value, weight in zip(values, weights, strict=False) if value.requires_grad)
    return torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None])


CHANGES = [{}, {"temperature": 0.6}, {"scale": 0.125, "temperature": 1.3}, {"cap": 5.0}, {"cap": 4.0, "scale": 0.5}]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("columns", [128, 192, 333, 999, 1024])  # in multiples of 64; the last holds all
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_values_and_gradients_against_all_logits(change, columns, entropy_gradient):
    leaves, targets, weights = tensors(bias=columns != 192)
    found = linear_logprobs(*leaves, targets, **change, entropy_gradient=entropy_gradient, chunk_bytes=columns * EACH)
    wanted = naive(*leaves, targets, **change)
    assert all(value.dtype == torch.float32 for value in found)
    assert found[1].requires_grad == entropy_gradient
    for value, right in zip(found, wanted, strict=True):
        assert torch.allclose(value.double(), right, rtol=1e-5, atol=1e-5)
    right = wanted if entropy_gradient else [wanted[0], wanted[1].detach()]
    assert_close(gradients(found, weights, leaves), gradients(right, weights, leaves), 1e-5)


@pytest.mark.parametrize("cap, columns", [(None, 256), (3.0, 256), (None, 128), (3.0, 128)])
def test_gradcheck(cap, columns):
    generator = torch.Generator().manual_seed(1)
    leaves = [torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((1, 3, 4), (200, 4), (200,))]
    targets = torch.tensor([[0, 130, 199]])

    def call(hidden, weight, bias):
        return linear_logprobs(hidden, weight, bias, targets, 0.7, 1.5, cap, True, chunk_bytes=12 * columns)

    leaves = [leaf.requires_grad_() for leaf in leaves]
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


def test_one_chunk_twice_through_the_same_graph():
    leaves, targets, weights = tensors()
    values = linear_logprobs(*leaves, targets, entropy_gradient=True)
    loss = (torch.stack(values) * weights).sum()
    first, second = (torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("columns", [128, 1024])
def test_bf16_weights_as_the_models_own_head(columns):
    """The matrix products in bf16 as nn.Linear has them, everything after in fp32: against the same with autograd."""
    leaves, targets, weights = tensors(torch.bfloat16)
    found = linear_logprobs(*leaves, targets, 0.6, entropy_gradient=True, chunk_bytes=columns * EACH)
    logits = nn.functional.linear(*leaves).float() / 0.6
    log_p = logits.log_softmax(-1)
    wanted = log_p.gather(-1, targets[..., None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
    for value, right in zip(found, wanted, strict=True):
        assert torch.allclose(value, right, rtol=1e-5, atol=1e-5)
    assert_close(gradients(found, weights, leaves), gradients(wanted, weights, leaves), 2**-7)


@pytest.mark.parametrize("columns", [128, 1024])
@pytest.mark.parametrize("shift", [0, -3e4, 3e4])
def test_huge_logits(columns, shift):
    """Up to 2e5 of either sign, also where all are far below 0 or above it."""
    leaves, targets, weights = tensors(loud=1.0 if shift else 1e4)
    leaves[2].data += shift
    found = linear_logprobs(*leaves, targets, 0.6, entropy_gradient=True, chunk_bytes=columns * EACH)
    for value, right in zip(found, naive(*leaves, targets, 0.6), strict=True):
        assert value.isfinite().all()
        assert (value - right).abs().max() < 2e5 * 2**-22  # a few roundings of such logits
    assert all(gradient.isfinite().all() for gradient in gradients(found, weights, leaves))


class Largest(TorchDispatchMode):
    """The most elements of any tensor that is made inside."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **kwargs or {})
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            self.numel = max(self.numel, tensor.numel() if isinstance(tensor, torch.Tensor) else 0)
        return made


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_of_all_logits(entropy_gradient, dtype):
    """All logits would be N = 37 times 40,000 numbers; the weight's gradient is 40,000."""
    _, targets, weights = tensors()
    leaves = [torch.randn(1, N, 1, dtype=dtype).requires_grad_(), torch.randn(40_000, 1, dtype=dtype).requires_grad_()]
    settings = dict(entropy_gradient=entropy_gradient, chunk_bytes=500 * EACH)
    with Largest() as mode:
        gradients(linear_logprobs(*leaves, None, targets, **settings), weights, leaves)
    assert mode.numel == 40_000
    with torch.no_grad(), Largest() as mode:
        linear_logprobs(*leaves, None, targets, **settings)
    assert mode.numel < 500 * N


def test_only_positions_that_predict_go_through_the_head():
    model, row, shapes = small("qwen3_5_text"), row_of(), []
    head = find_head(model)
    head.linear.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    token_logprobs(model, row, 1.0, head)
    assert shapes == [(2, 4, model.config.hidden_size)]


def test_an_error_in_the_model_leaves_nothing_behind():
    model, row = small("llama"), row_of()
    head = find_head(model)
    row.targets_BK = row.targets_BK[:, :3]  # of another row
    with pytest.raises(RuntimeError):
        token_logprobs(model, row, 1.0, head)
    assert "forward" not in vars(head.linear)


@pytest.mark.parametrize("model_type", ["phi", "qwen3_5_text"])
def test_autocast_as_the_models_own_head(model_type, monkeypatch):
    """fp32 weights and bf16 products, which is how accelerate runs DDP."""
    dtypes = []

    def spy(hidden_BKD, weight_VD, bias_V, *others):
        dtypes.extend(tensor.dtype for tensor in (hidden_BKD, weight_VD, bias_V) if tensor is not None)
        return linear_logprobs(hidden_BKD, weight_VD, bias_V, *others, chunk_bytes=1)

    monkeypatch.setattr(logprobs, "linear_logprobs", spy)
    model, row, weights = small(model_type), row_of(), torch.randn(2, 2, 4)
    ways = [head := find_head(model), dataclasses.replace(head, linear=None)]
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = (token_logprobs(model, row, 0.6, way, entropy_gradient=True) for way in ways)
    assert_close(found, wanted, 1e-5)
    gradients_found, gradients_wanted = (gradients_of(model, each, weights) for each in (found, wanted))
    assert_close(gradients_found.values(), gradients_wanted.values(), 0.05)  # bf16, whose sums may cancel: 0.024 seen
    assert set(dtypes) == {torch.bfloat16}  # backward, outside of autocast, makes the same logits again


def test_two_ranks():
    """FSDP2 and DDP, tied and not, capped and scaled: the numbers of full logits, and of one process."""
    ended = on_ranks(2, logprob_ranks.check)
    assert ended.status == 0 and ended.output.count("checked") == 2, ended.output
