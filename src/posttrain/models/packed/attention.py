"""Attention on packed documents: each by itself, without a mask of [T, T].

transformers' sdpa and eager attention are called on the documents one by one, or on documents of similar length as a
batch: the cost is the sum of L^2 instead of T^2, and no mask is made where plain causal attention is meant.
Flash attention is left alone: it takes the boundaries itself. So are models whose attention does not go through
transformers' attention interface with the arguments of the call: they have the mask made of position_ids.

Symptoms this replaces. gpt_oss and granitemoehybrid make their mask without position_ids, so that documents attend
to each other (logits off by 0.9 to 1.1 of the largest). The mask is bool [1, 1, T, T], 1 GB at T = 32,768. And
transformers asks the device at each call whether the row is packed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils

from posttrain.models.internals import Interface, attention_in_use, registered
from posttrain.models.packed.boundaries import by_document, documents
from posttrain.models.packed.layers import mixers, modeling_module

OURS = ("sdpa", "eager")
SLICE = 1024  # queries of one call where a mask is needed: it holds so many rows of keys
# They lose the arguments of the call on the way to attention (transformers 5.23).
WANT_A_MASK = {"git", "gpt_neo", "nemotron", "stablelm"}

# Boundaries of the model call that is running, for the masks, which a model makes before its first layer. The layers
# never read it: they get theirs as arguments, which activation checkpointing keeps for the second forward.
_call: ContextVar[tuple[tuple[int, ...], Tensor] | None] = ContextVar("packed model call", default=None)


def install(model: PreTrainedModel) -> None:
    """Replace transformers' sdpa and eager attention and their masks for `model`. Idempotent.

    Without boundaries the replacements are what they replace.
    """
    for name in OURS:
        _replace_entry(AttentionMaskInterface, name, _mask)
    _replace_entry(AttentionInterface, "sdpa", attention_by_document)
    _replace(masking_utils, "find_packed_sequence_indices", _document_numbers)
    for module in {modeling_module(layer) for layer in mixers(model)}:
        if hasattr(module, "eager_attention_forward"):
            _replace(module, "eager_attention_forward", functools.partial(attention_by_document, additive=True))
        if hasattr(module, "create_causal_mask"):
            _replace(module, "create_causal_mask", _mask_for_the_model)
    if not any(getattr(hook, "func", None) is _begin for hook in model._forward_pre_hooks.values()):
        model.register_forward_pre_hook(functools.partial(_begin, needs_no_mask(model)), with_kwargs=True)
        model.register_forward_hook(_end, always_call=True)


def needs_no_mask(model: PreTrainedModel) -> bool:
    """Whether the boundaries come to the attention of `model`, so that it can do without a mask."""
    attends = {modeling_module(layer) for layer in mixers(model)}
    through_the_interface = all(hasattr(module, "ALL_ATTENTION_FUNCTIONS") for module in attends)
    return through_the_interface and model.config.model_type not in WANT_A_MASK


def describe(model: PreTrainedModel, packed: bool) -> str:
    """The attention of `model` in words."""
    name = attention_in_use(model.config)
    if not packed or name not in OURS:
        return name
    return f"{name} by document" if needs_no_mask(model) else f"{name} with a mask of [T, T]"


def _replace(owner: ModuleType, name: str, make: Callable) -> None:
    if not hasattr(upstream := getattr(owner, name), "by_document"):
        setattr(owner, name, _marked(upstream, make))


def _replace_entry(interface: Interface, name: str, make: Callable) -> None:
    if not hasattr(upstream := registered(interface)[name], "by_document"):
        interface.register(name, _marked(upstream, make))


def _marked(upstream: Callable, make: Callable) -> Callable:
    replacement: Any = functools.wraps(upstream)(make(upstream))
    replacement.by_document = True
    return replacement


def _begin(no_mask: bool, model: PreTrainedModel, args: tuple, kwargs: dict) -> None:
    """ValueError for boundaries that are not of this row: attention would let its documents see each other."""
    lengths, seq_idx = kwargs.get("document_lengths"), kwargs.get("seq_idx")
    _call.set(None)
    if lengths is None or len(lengths) == 1:
        return
    sent = [*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
    row = next(tensor for tensor in sent if tensor is not None)
    made_with = getattr(seq_idx, "document_lengths", lengths)
    if tuple(row.shape[:2]) != (1, sum(lengths)) or tuple(made_with) != tuple(lengths):
        raise ValueError(
            f"document_lengths of {sum(lengths)} tokens in all must fill one row and be those of seq_idx, got a row of "
            f"shape {list(row.shape[:2])}: pass boundaries() of the very row, padding included as a document"
        )
    if kwargs.get("past_key_values") is not None or kwargs.get("use_cache"):
        raise ValueError("a packed row takes no cache and makes none: use_cache=False")
    if no_mask and seq_idx is not None:
        _call.set((lengths, seq_idx))


def _end(*_: Any) -> None:
    _call.set(None)


def _document_numbers(upstream: Callable) -> Callable:
    def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
        call = _call.get()
        return upstream(position_ids) if call is None else call[1]

    return find_packed_sequence_indices


def _mask_for_the_model(upstream: Callable) -> Callable:
    """A model that wants the mask for uses of its own gets it whole."""

    def create_causal_mask(*args: Any, **kwargs: Any) -> Tensor | None:
        if kwargs.get("allow_is_causal_skip", True):
            return upstream(*args, **kwargs)
        call = _call.set(None)
        try:
            return upstream(*args, **kwargs)
        finally:
            _call.reset(call)

    return create_causal_mask


def _mask(upstream: Callable) -> Callable:
    """No mask for packed rows, unless it says more than that attention is causal, in a window or not."""

    def mask(*args: Any, **kwargs: Any) -> Tensor | None:
        if (call := _call.get()) is not None:
            chunk = getattr(kwargs.get("config"), "attention_chunk_size", None) or max(call[0])
            # The model brings a mask function of its own.
            other = kwargs.get("use_vmap") or kwargs.get("allow_is_bidirectional_skip")
            if kwargs.get("attention_mask") is None and chunk >= max(call[0]) and not other:
                return None
        return upstream(*args, **kwargs)

    return mask


def attention_by_document(upstream: Callable, additive: bool = False) -> Callable:
    """`upstream` on each document; `additive`: it takes causality from a mask of 0 and the least number only."""

    def attention(module, query, key, value, attention_mask=None, *args, **kwargs):
        rows, _, tokens, _ = query.shape
        sent = kwargs.get("document_lengths")
        # Then this is not attention along the row.
        whole = sent is not None and sum(sent) != tokens
        lengths = None if whole or key.shape[2] != tokens else documents(kwargs, rows, tokens)
        if lengths is None:
            return upstream(module, query, key, value, attention_mask, *args, **kwargs)
        bias = kwargs.pop("position_bias", None)
        if attention_mask is None and bias is None:

            def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [n, H, L, D] -> [n, L, H, D]
                length, window = q.shape[2], window_of(module, kwargs.get("sliding_window"))
                window = None if window is None or window >= length else window
                if not (additive or window):
                    return upstream(module, q, k, v, None, *args, **kwargs)[0]
                # A mask of the whole document would be its length squared: a slice of queries sees no more than these.
                parts = []
                for first in range(0, length, SLICE):
                    end = min(first + SLICE, length)
                    begin = 0 if window is None else max(0, first - window + 1)
                    where = end - first, end - begin, first - begin
                    mask = causal_mask(*where, window, q.dtype if additive else torch.bool, q.device)
                    own = q[:, :, first:end], k[:, :, begin:end], v[:, :, begin:end]
                    parts.append(upstream(module, *own, mask, *args, **kwargs)[0])
                return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

            return by_document(causal, lengths, (query, key, value), dim=2), None
        outputs = []
        for start, end in pairwise(accumulate(lengths, initial=0)):
            q, k, v = (x[:, :, start:end] for x in (query, key, value))
            mask = None if attention_mask is None else attention_mask[..., start:end, start:end]
            own = kwargs if bias is None else kwargs | {"position_bias": bias[..., start:end, start:end]}
            outputs.append(upstream(module, q, k, v, mask, *args, **own)[0])
        return torch.cat(outputs, 1), None

    return attention


def window_of(module: nn.Module, sent: int | None) -> int | None:
    """How far a query sees: as attention is told, or, where it is told nothing, as the mask of its model would say.

    PhiMoE (transformers 5.23) has its window in the mask alone.
    """
    if sent is not None or hasattr(module, "sliding_window"):
        return sent
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    full = kinds is not None and index is not None and kinds[index] != "sliding_attention"
    if full or not hasattr(modeling_module(module), "create_sliding_window_causal_mask"):
        return None
    return getattr(config, "sliding_window", None)


@functools.lru_cache(maxsize=2)
@torch.inference_mode(False)
def causal_mask(
    queries: int, keys: int, before: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[1, 1, queries, keys] of one slice, with `before` keys before its first query: true where a query sees a key.

    Or 0 there and the least number elsewhere. The layers of a model ask for the same one in turn: two are kept.
    """
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(before)
    seen = seen if window is None else seen.triu(before + 1 - window)
    if dtype is not torch.bool:
        seen = torch.where(seen, torch.zeros((), dtype=dtype, device=device), torch.finfo(dtype).min)
    return seen[None, None]
