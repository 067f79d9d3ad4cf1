"""Stateful operations on packed documents in plain torch: for CPUs, for tests and for GPUs without fused kernels.

They are exact: a document's result does not depend on what else is in the row. All but the convolution call
transformers' own torch function (`raw`) on the documents by themselves (`by_document`): the mathematics stays
upstream's.
Resetting the decay at boundaries instead would need no regrouping, but its cumulative sums round: 2e-5 against
4e-8 on the gradient of the delta rule.

Shapes: B rows, T tokens, D channels; sizes inside a layer are words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers.activations import ACT2FN

from posttrain.models.packed.boundaries import Edges, by_document, edge_plan

CHUNK = 64  # tokens in a chunk of the chunked delta rule, upstream's own choice


def chunk_size(tokens: int, largest: int = CHUNK) -> int:
    """The chunk for rows of so many tokens: chunked rules pad to whole chunks, and short rows need no large one."""
    return min(1 << (tokens - 1).bit_length(), largest)


def delta_rule(
    raw: Callable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    lengths: tuple[int, ...],
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`raw` (transformers' chunked gated delta rule, or Kimi delta attention) on each document of a row.

    query, key [1, T, heads, dk]; value [1, T, value heads, dv]; g (log decay) [1, T, value heads] or, Kimi,
    [1, T, value heads, dk]; beta [1, T, value heads]. Returns [1, T, value heads, dv], None.
    Errors: ValueError for a recurrent state, which documents do not have in common.
    """
    refuse_state(lengths, **kwargs)

    def documents(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
        return raw(q, k, v, g=decay, beta=rate, chunk_size=chunk_size(q.shape[1]), **kwargs)[0]

    return by_document(documents, lengths, (query, key, value, g, beta)), None


def state_space_scan(
    raw: Callable,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk: int,
    lengths: tuple[int, ...],
    **kwargs: Any,
) -> Tensor:
    """`raw` (transformers' mamba2_chunk_scan) on each document of a row.

    hidden_states [1, T, heads, dv]; dt [1, T, heads]; A [heads]; B, C [1, T, groups, state].
    Returns [1, T, heads, dv].
    Errors: ValueError for a recurrent state.
    """
    refuse_state(lengths, kwargs.get("initial_states"), kwargs.get("return_final_states", False))

    def documents(x: Tensor, step: Tensor, to_state: Tensor, from_state: Tensor) -> Tensor:
        return raw(x, step, A, to_state, from_state, chunk_size=chunk_size(x.shape[1], min(chunk, CHUNK)), **kwargs)

    return by_document(documents, lengths, (hidden_states, dt, B, C))


def refuse_state(
    lengths: tuple[int, ...], initial_state: Tensor | None = None, output_final_state: bool = False, **_: Any
) -> None:
    """ValueError for a recurrent state in or out: several documents do not have one in common."""
    if initial_state is not None or output_final_state:
        raise ValueError(f"{len(lengths)} packed documents cannot share a recurrent state: use_cache=False")


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    lengths: tuple[int, ...],
) -> Tensor:
    """The causal depthwise convolution of each document of x [1, D, T] alone; weight [D, taps], bias [D].

    y[t] = activation(bias + sum over k < taps of weight[taps - 1 - k] x[t - k]), where t - k is in t's document.
    """
    out = _Taps.apply(x, weight, bias, edge_plan(lengths, weight.shape[-1] - 1, x.device))
    return out if activation is None else ACT2FN[activation](out)


class _Taps(torch.autograd.Function):
    """Tap by tap: as fast as torch's convolution on a CPU, which cannot stop at a boundary.

    Tap k must not read the last k tokens of a document for the next one: they are zeroed before it, one more
    position a tap. In backward the same holds for the first k gradients. Sums are in fp32 at least.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, edges: Edges) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.edges, ctx.has_bias = edges, bias is not None
        source = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
        # [D, taps, 1], with the present token's tap first.
        taps = weight.to(source.dtype).flip(1)[..., None]
        out = source * taps[:, 0]
        for k in range(1, weight.shape[-1]):
            source.index_fill_(2, edges.last[k - 1], 0)
            out[..., k:].addcmul_(source[..., :-k], taps[:, k])
        return (out if bias is None else out + bias[:, None]).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad = grad.to(torch.promote_types(x.dtype, torch.float32), copy=True)
        taps = weight.to(grad.dtype).flip(1)[..., None]
        grad_bias = grad.sum((0, 2)).to(weight.dtype) if ctx.has_bias else None
        grad_x, grad_taps = grad * taps[:, 0], [_dot(grad, x)]
        for k in range(1, weight.shape[-1]):
            grad.index_fill_(2, ctx.edges.first[k - 1], 0)
            grad_x[..., :-k].addcmul_(grad[..., k:], taps[:, k])
            grad_taps.append(_dot(grad[..., k:], x[..., :-k]))
        return grad_x.to(x.dtype), torch.stack(grad_taps[::-1], -1).to(weight.dtype), grad_bias, None


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Sum of products over rows and tokens, [D]; each way is several times slower in the other memory layout."""
    return torch.einsum("bdt,bdt->d", a, b.to(a.dtype)) if b.stride(-1) == 1 else (a * b).sum((0, 2))
