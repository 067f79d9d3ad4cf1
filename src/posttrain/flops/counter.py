"""torch's FLOP counter on a running model, made to see what the mathematics needs: the reference for `size`.

The counter counts what is executed, and sees no fused kernel. Here attention multiplies each query with the keys
that the model's own mask lets it see, recurrences run token by token as the matrix products that they are, and a
convolution is billed for its tokens and not for its padding. Attention that a model does by itself stays dense.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

NAME = "query_by_query"
EVERY_EXPERT = ("Llama4TextMoe",)  # their forward multiplies the experts not chosen too, by zeros


def count(model: PreTrainedModel, lengths: Sequence[int], logits: int | None = None) -> tuple[int, bool]:
    """FLOPs of a forward pass of these documents in one row on the CPU, and whether it counts what attention sees.

    If not, each query was multiplied with every key of the row. The LM head computes the last `logits` positions,
    all by default. The model keeps the attention and the experts that the counter sees.
    """
    seen: list[int] = []
    AttentionInterface.register(NAME, lambda *args, **kwargs: _attention(seen, *args, **kwargs))
    AttentionMaskInterface.register(NAME, eager_mask)
    for choose, ours in ((model.set_attn_implementation, NAME), (model.set_experts_implementation, "batched_mm")):
        try:
            choose(ours)
        # The model's classes leave no choice.
        except ValueError:
            choose("eager")
    # Some models refuse in their log only.
    if model.config._attn_implementation != NAME:
        model.set_attn_implementation("eager")
    ids_T = torch.arange(sum(lengths)) % model.config.get_text_config(decoder=True).vocab_size
    arguments = {"input_ids": ids_T[None], "use_cache": False}
    if len(lengths) > 1:
        arguments["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None]
    if logits is not None:
        arguments["logits_to_keep"] = logits
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.convolution: _convolution})
    # The counter's module tracker fails without gradients.
    with recurrences(model), torch.enable_grad(), counter:
        model(**arguments)
    return counter.get_total_flops(), bool(seen)


def takes_logits_to_keep(model: PreTrainedModel) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def _attention(
    seen: list[int],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One query at a time, over the keys it sees. query [B, heads, T, dk], key [B, groups, keys, dk], value
    [B, groups, keys, dv]; gives [B, T, heads, dv].

    Sinks and soft caps multiply no matrices and are left out.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    outputs = []
    for t in range(query.shape[2]):
        visible = torch.arange(key.shape[2]) <= t + key.shape[2] - query.shape[2]
        row = None
        if attention_mask is not None:
            row = attention_mask[:, :, t]
            visible = row if row.dtype == torch.bool else row > torch.finfo(row.dtype).min / 2
            visible = visible.flatten(end_dim=-2).any(0)
        scores = query[:, :, t : t + 1] @ key[:, :, visible].transpose(2, 3) * scaling
        if row is not None and row.dtype != torch.bool:
            scores = scores + row[:, :, None, visible]
        outputs.append(scores.softmax(-1) @ value[:, :, visible])
        seen.append(int(visible.sum()))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _convolution(
    x_shape: list[int],
    w_shape: list[int],
    bias: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    *args: Any,
    out_shape: list[int],
    **kwargs: Any,
) -> int:
    """Causal convolutions pad both ends and drop the outputs past the last token."""
    return conv_flop_count(x_shape, w_shape, [*out_shape[:2], *map(min, x_shape[2:], out_shape[2:])], transposed)


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """S <- exp(g) S, S <- S + k (beta (v - k S)), o = q S.

    query, key [B, T, groups, dk], value [B, T, heads, dv], g [B, T, heads(, dk)].
    """
    heads = value.shape[2]
    query, key = (x.float().repeat_interleave(heads // x.shape[2], dim=2) for x in (query, key))
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    decay = (g if g.ndim == 4 else g[..., None]).float().exp()
    state = query.new_zeros(query.shape[0], heads, query.shape[-1], value.shape[-1])
    outputs = []
    for t in range(query.shape[1]):
        state = state * decay[:, t, :, :, None]
        k = key[:, t, :, None]
        change = beta[:, t, :, None, None].float() * (value[:, t, :, None].float() - k @ state)
        state = state + k.transpose(2, 3) @ change
        outputs.append(query[:, t, :, None] @ state)
    return torch.cat(outputs, dim=2).transpose(1, 2).to(value.dtype), None


def _state_space_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0, torch.inf),
    **kwargs: Any,
) -> Tensor | tuple[Tensor, None]:
    """h <- exp(dt A) h + (dt x) B, y = h C + D x.

    x [B, T, heads, width], dt [B, T, heads], B, C [B, T, groups, state].
    """
    heads = x.shape[2]
    B, C = (y.float().repeat_interleave(heads // y.shape[2], dim=2) for y in (B, C))
    dt = dt if dt_bias is None else dt + dt_bias
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit).float()
    state = B.new_zeros(x.shape[0], heads, x.shape[-1], B.shape[-1])
    outputs = []
    for t in range(x.shape[1]):
        write = (dt[:, t, :, None] * x[:, t].float())[..., None] @ B[:, t, :, None]
        state = (dt[:, t] * A.float()).exp()[..., None, None] * state + write
        outputs.append((state @ C[:, t, ..., None]).squeeze(-1))
    y = torch.stack(outputs, dim=1)
    y = y if D is None else y + D[..., None] * x.float()
    return (y, None) if kwargs.get("return_final_states") else y


def _selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, None]:
    """The same for single channels. x, dt, z [B, D, T], A [D, state], B, C [B, state, T]; gives [B, D, T]."""
    dt = dt if delta_bias is None else dt + delta_bias[:, None]
    dt = (F.softplus(dt) if delta_softplus else dt).float()
    state = A.new_zeros(x.shape[0], x.shape[1], 1, A.shape[1])
    outputs = []
    for t in range(x.shape[2]):
        write = (dt[:, :, t] * x[:, :, t].float())[..., None, None] @ B[:, None, None, :, t].float()
        state = (dt[:, :, t, None] * A).exp()[:, :, None] * state + write
        outputs.append((state @ C[:, None, :, t, None].float()).flatten(1))
    y = torch.stack(outputs, dim=2)
    y = y if D is None else y + D[:, None] * x.float()
    y = y if z is None else y * F.silu(z.float())
    return (y, None) if kwargs.get("return_last_state") else y


RECURRENCES: dict[str, Callable] = {
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _state_space_scan,
    "mamba_selective_scan": _selective_scan,
}


@contextmanager
def recurrences(model: PreTrainedModel) -> Iterator[None]:
    """Replace the functions that the model's layers look up in their modeling files."""
    files = {sys.modules[type(module).__module__] for module in model.modules()}
    upstream = [(file, name, vars(file)[name]) for file in files for name in RECURRENCES.keys() & vars(file).keys()]
    for file, name, _ in upstream:
        setattr(file, name, RECURRENCES[name])
    try:
        yield
    finally:
        for file, name, function in upstream:
            setattr(file, name, function)
