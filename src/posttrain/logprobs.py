"""Token logprobs and entropies of the policy that was sampled from: the softmax of logits / temperature.

Logits are the largest tensor of an update: 8,192 tokens of a vocabulary of 248,320 are 4 GB in bf16 and 8 GB in fp32,
several times over. Here they exist a chunk of the vocabulary at a time: during a model call the head's `forward` is
another one, from hidden states to logprobs. The call is the model's own, so it gathers sharded parameters as ever.

No library has logprobs and entropies per token, with gradients. liger-kernel 0.8.5 (chunked_loss): no entropy, and the
weight's gradient in fp32. cut-cross-entropy 25.1.1: no entropy, no temperature, no import without triton. torch 2.13
(F.linear_cross_entropy, reduction="none"): no entropy, no temperature, losses in bf16 of bf16 inputs, off by 0.06.

Shape suffixes: B rows, T positions, K of them that predict, N = B K; V vocabulary, v a chunk of it; D features,
here the hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posttrain.models.head import Head, at_positions, forwards_replaced
from posttrain.records import PackedRow

# Of the logits [N, v] of one chunk in fp32. About three times as much exists at a time.
CHUNK_BYTES = 2**27
# Of a chunk, however many tokens there are: narrower products waste the matrix units.
LEAST_COLUMNS = 128


def token_logprobs(
    model: nn.Module, row: PackedRow, temperature: float, head: Head, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Logprobs of `row.targets_BK` and entropies (nats), both fp32 [B, K], of softmax(logits / temperature).

    `model` may be wrapped (FSDP2, DDP); `head` is what `find_head` said of it before. Logprobs have a gradient,
    entropies with `entropy_gradient`. Only the positions that predict a trained token go through the head.
    """
    linear = head.linear
    if linear is None:
        logits_BKV = at_positions(model(**row.model_inputs()).logits, row.kept_K).float() / temperature
        normalizer_BK = logits_BKV.logsumexp(-1)
        logprobs_BK = logits_BKV.gather(-1, row.targets_BK[..., None]).squeeze(-1) - normalizer_BK
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy_BK = normalizer_BK - ((logits_BKV - normalizer_BK[..., None]).exp() * logits_BKV).sum(-1)
        return logprobs_BK, entropy_BK
    calls: list[Tensor] = []

    def forward(hidden_BTD: Tensor) -> Tensor:
        hidden_BKD, weight_VD = at_positions(hidden_BTD, row.kept_K), linear.weight
        bias_V: Tensor | None = linear.bias
        # nn.Linear would do the same under autocast.
        if torch.is_autocast_enabled(hidden_BTD.device.type):
            dtype = torch.get_autocast_dtype(hidden_BTD.device.type)
            hidden_BKD, weight_VD = hidden_BKD.to(dtype), weight_VD.to(dtype)
            bias_V = None if bias_V is None else bias_V.to(dtype)
        change = temperature, head.scale, head.cap
        tensors = hidden_BKD, weight_VD, bias_V, row.targets_BK
        values_BK2 = torch.stack(linear_logprobs(*tensors, *change, entropy_gradient), -1)
        calls.append(values_BK2.detach())
        # Zero, with the gradient of the values: what the model does to logits leaves it zero, and scales the gradient.
        return values_BK2 - calls[-1]

    with forwards_replaced({linear: forward}):
        zeros_BK2 = model(**row.model_inputs()).logits
    # The model calls its head once, as find_head saw.
    (values_BK2,) = calls
    logprobs_BK, entropy_BK = (values_BK2 + zeros_BK2 / head.scale).unbind(-1)
    return logprobs_BK, entropy_BK if entropy_gradient else entropy_BK.detach()


def linear_logprobs(
    hidden_BKD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_BK: Tensor,
    temperature: float = 1.0,
    scale: float = 1.0,
    cap: float | None = None,
    entropy_gradient: bool = False,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """log p(target) and the entropy H (nats) of p = softmax(y), [B, K] in fp32 (of fp64: fp64).

    y = f(x) / temperature; x = hidden weight^T + bias in the dtype of these, f (see `Head`) and the rest in fp32.
    Forward goes over chunks of the vocabulary with a running maximum and sum (Milakov and Gimelshein,
    arXiv:1805.02867); backward makes each chunk of logits again, or keeps them where there is only one. With g the
    gradient of log p(target) and h that of H, dL/dy = g (onehot(target) - p) - h p (log p + H).
    """
    columns = max((chunk_bytes or CHUNK_BYTES) // (4 * max(targets_BK.numel(), 1)), LEAST_COLUMNS) // 64 * 64
    change, width = (temperature, scale, cap, entropy_gradient), min(columns, len(weight_VD))
    tensors = hidden_BKD.flatten(0, 1), weight_VD, bias_V, targets_BK.flatten()
    return tuple(values_N.view_as(targets_BK) for values_N in _LinearLogprobs.apply(*tensors, change, width))


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, bias_V, targets_N, change, width):
        ctx.change, ctx.width = change, width
        dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        largest_N = torch.full_like(targets_N, torch.finfo(dtype).min, dtype=dtype)
        # With d = y - largest so far: the sums of e^d and of d e^d.
        target_N, sum_N, product_N = (torch.zeros_like(largest_N) for _ in range(3))
        for start in range(0, len(weight_VD), width):
            y_Nv = _logits(hidden_ND, weight_VD, bias_V, slice(start, start + width), change)
            column_N = (targets_N - start).clamp(0, y_Nv.shape[1] - 1)
            found_N = y_Nv.gather(1, column_N[:, None]).squeeze(1)
            target_N = torch.where(column_N + start == targets_N, found_N, target_N)
            before_N, largest_N = largest_N, torch.maximum(largest_N, y_Nv.amax(1))
            d_Nv = y_Nv - largest_N[:, None] if width == len(weight_VD) else y_Nv.sub_(largest_N[:, None])
            shift_N, exp_Nv = before_N - largest_N, d_Nv.exp()
            product_N = (product_N + sum_N * shift_N) * shift_N.exp()
            sum_N = sum_N * shift_N.exp() + exp_Nv.sum(1)
            product_N += exp_Nv.mul_(d_Nv).sum(1)
            kept_NV = y_Nv if width == len(weight_VD) else None
            # Before the next chunk is made, this one must be gone.
            del y_Nv, d_Nv, exp_Nv
        normalizer_N, entropy_N = largest_N + sum_N.log(), sum_N.log() - product_N / sum_N
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, kept_NV, normalizer_N, entropy_N)
        if not change[-1]:
            ctx.mark_non_differentiable(entropy_N)
        return target_N - largest_N - sum_N.log(), entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logprobs_N, grad_entropy_N):
        hidden_ND, weight_VD, bias_V, targets_N, kept_NV, normalizer_N, entropy_N = ctx.saved_tensors
        temperature, scale, cap, entropy_gradient = ctx.change
        grad_hidden_ND = torch.zeros_like(hidden_ND, dtype=normalizer_N.dtype) if ctx.needs_input_grad[0] else None
        grad_weight_VD = torch.empty_like(weight_VD) if ctx.needs_input_grad[1] else None
        grad_bias_V = torch.empty_like(bias_V) if ctx.needs_input_grad[2] else None
        for start in range(0, len(weight_VD), ctx.width):
            chunk = slice(start, start + ctx.width)
            y_Nv = _logits(hidden_ND, weight_VD, bias_V, chunk, ctx.change) if kept_NV is None else kept_NV
            logprobs_Nv = y_Nv - normalizer_N[:, None]
            # Without a cap the logits are not needed again: a chunk's memory less.
            y_Nv = y_Nv if cap else None
            grad_Nv = logprobs_Nv.exp()
            if entropy_gradient:
                logprobs_Nv.add_(entropy_N[:, None]).mul_(grad_entropy_N[:, None]).add_(grad_logprobs_N[:, None])
                grad_Nv.mul_(logprobs_Nv.neg_())
            else:
                grad_Nv.mul_(-grad_logprobs_N[:, None])
            del logprobs_Nv
            column_N = (targets_N - start).clamp(0, grad_Nv.shape[1] - 1)
            onehot_N = (column_N + start == targets_N) * grad_logprobs_N
            grad_Nv.scatter_add_(1, column_N[:, None], onehot_N[:, None])
            # tanh' = 1 - tanh^2
            if cap:
                grad_Nv.mul_((y_Nv * (temperature / cap)).square_().neg_().add_(1))
            if scale != temperature:
                grad_Nv.mul_(scale / temperature)
            grad_Nv = grad_Nv.to(hidden_ND.dtype)
            if grad_hidden_ND is not None:
                grad_hidden_ND += grad_Nv @ weight_VD[chunk]
            if grad_weight_VD is not None:
                torch.mm(grad_Nv.t(), hidden_ND, out=grad_weight_VD[chunk])
            if grad_bias_V is not None:
                grad_bias_V[chunk] = grad_Nv.sum(0)
            del grad_Nv, y_Nv
        return grad_hidden_ND, grad_weight_VD, grad_bias_V, None, None, None


def _logits(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    chunk: slice,
    change: tuple[float, float, float | None, bool],
) -> Tensor:
    """y [N, v] of one chunk, in fp32 (of fp64: fp64)."""
    temperature, scale, cap, _ = change
    y_Nv = F.linear(hidden_ND, weight_VD[chunk], None if bias_V is None else bias_V[chunk])
    y_Nv = y_Nv.to(torch.promote_types(y_Nv.dtype, torch.float32))
    if cap:
        return y_Nv.mul_(scale / cap).tanh_().mul_(cap / temperature)
    return y_Nv if scale == temperature else y_Nv.mul_(scale / temperature)
