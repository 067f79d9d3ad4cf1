"""Where documents begin and end in a row, and how to take a row apart and put it together again.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import index as as_int
from typing import Any, NamedTuple

import torch
from torch import Tensor

BOUNDARIES = (
    "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx",
    "document_lengths",
)  # fmt: skip


def boundaries(lengths: Sequence[int], device: torch.device | str) -> dict[str, Tensor | int | tuple | bool]:
    """Keyword arguments of a model call on one row [1, T]: documents of `lengths` tokens, end to end.

    position_ids int64 [1, T], from 0 in each document; cu_seq_lens_q and _k int32 [documents + 1]; max_length_q and
    _k; seq_idx int32 [1, T]; use_cache=False; document_lengths, so that no layer has to ask the device.
    Tail padding is a document of its own. Errors: ValueError for no documents, or one of no tokens.
    """
    lengths = tuple(as_int(n) for n in lengths)
    if not lengths or min(lengths) < 1:
        raise ValueError(f"documents need at least one token each, got lengths {list(lengths)}")
    counts = torch.tensor(lengths)
    starts = torch.tensor(list(accumulate(lengths, initial=0)))
    position_ids = torch.arange(sum(lengths)) - starts[:-1].repeat_interleave(counts)
    seq_idx: Any = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(counts)
    offsets = starts.to(device, torch.int32)
    seq_idx = seq_idx[None].to(device)
    # lfm2 hands on seq_idx alone (transformers 5.17).
    seq_idx.document_lengths = lengths
    return {
        "position_ids": position_ids[None].to(device),
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "seq_idx": seq_idx,
        "document_lengths": lengths,
        "use_cache": False,
    }


def documents(boundaries: dict, rows: int, tokens: int) -> tuple[int, ...] | None:
    """Lengths of the documents in a [rows, tokens] call; None if each row is one document.

    Reads `document_lengths`; a caller who sends only `cu_seqlens` or `seq_idx` pays a device synchronisation.
    Errors: ValueError if the documents do not fill exactly one row, or the boundaries disagree.
    """
    lengths, seq_idx = boundaries.get("document_lengths"), boundaries.get("seq_idx")
    sent = (boundaries.get(name) for name in ("cu_seqlens", "cu_seq_lens_q"))
    offsets = next((tensor for tensor in sent if tensor is not None), None)
    if lengths is not None:
        if offsets is not None and len(offsets) != len(lengths) + 1:
            raise ValueError(f"{len(lengths)} document_lengths, but {len(offsets) - 1} documents in cu_seqlens")
    elif offsets is not None:
        first, *rest = offsets.tolist()
        if first != 0:
            raise ValueError(f"cu_seqlens must start at 0, not at {first}")
        lengths = [end - start for start, end in pairwise([first, *rest]) if end != start]
    elif seq_idx is not None:
        if rows != 1:
            raise ValueError(f"seq_idx needs one row [1, T], got {rows} rows")
        # A seq_idx that `boundaries` made knows the lengths.
        lengths = getattr(seq_idx, "document_lengths", None)
        if lengths is None:
            lengths = torch.unique_consecutive(seq_idx[0], return_counts=True)[1].tolist()
    if lengths is None or len(lengths) == 1:
        return None
    if rows != 1 or sum(lengths) != tokens:
        raise ValueError(
            f"packed documents of {sum(lengths)} tokens in all must fill one row, got {rows} rows of "
            f"{tokens} tokens (a call with boundaries takes no cache: use_cache=False)"
        )
    return tuple(lengths)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Documents of similar length, as one batch [n, L]."""

    start: int  # of the only document; unused where n > 1
    index: Tensor  # [n, L] positions in the row; past its end a document repeats its last token


MERGE = 128  # tokens of padding that cost less than one more batch


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # a plan made during generation must stay usable in training
def bucket_plan(lengths: tuple[int, ...], device: torch.device) -> tuple[list[Bucket], Tensor]:
    """How to regroup a row of documents into batches of similar length, and back.

    Returns (buckets, inverse): `inverse` [T] finds each token in the concatenation of the flattened buckets.
    """
    starts, total = list(accumulate(lengths, initial=0)), sum(lengths)
    buckets, inverse, done = [], torch.empty(total, dtype=torch.long, device="cpu"), 0
    for members in _of_similar_length(lengths):
        start = torch.tensor([[starts[d]] for d in members], device="cpu")
        length = torch.tensor([[lengths[d]] for d in members], device="cpu")
        position = torch.arange(max(lengths[d] for d in members), device="cpu")
        index = start + torch.minimum(position, length - 1)
        place = torch.arange(done, done + index.numel(), device="cpu").view(index.shape)
        real = position < length
        inverse[index[real]] = place[real]
        done += index.numel()
        buckets.append(Bucket(starts[members[0]], _on(device, index)))
    return buckets, _on(device, inverse)


def _of_similar_length(lengths: tuple[int, ...]) -> list[list[int]]:
    """Documents by size, a power of two up to 64 and then its multiples; few or nearly as long join the next size."""
    by_size: dict[int, list[int]] = {}
    for document, length in enumerate(lengths):
        size = 1 << (length - 1).bit_length() if length <= 64 else -(-length // 64) * 64
        by_size.setdefault(size, []).append(document)
    groups: list[list[int]] = []
    for _, members in sorted(by_size.items()):
        longest = max(lengths[d] for d in members)
        if groups and sum(longest - lengths[d] for d in groups[-1]) <= MERGE:
            groups[-1] += members
        else:
            groups.append(members)
    return groups


def by_document(
    function: Callable[..., Tensor], lengths: tuple[int, ...], tensors: Sequence[Tensor], dim: int = 1
) -> Tensor:
    """`function`, which is causal, on each document of a row by itself.

    `tensors` have 1 row and T positions along `dim`; documents of similar length become one batch, right-padded:
    `function(*batches)` gets [n, ..., L, ...] each and returns [n, L, ...]. Padding is behind a causal function, so it
    changes nothing. Returns [1, T, ...].
    """
    buckets, inverse = bucket_plan(lengths, tensors[0].device)
    outputs = []
    for bucket in buckets:
        n, length = bucket.index.shape
        if n == 1:
            batches = [x.narrow(dim, bucket.start, length) for x in tensors]
        else:  # [..., n, L, ...] with the documents moved to the front
            flat = bucket.index.flatten()
            batches = [x[0].index_select(dim - 1, flat).unflatten(dim - 1, (n, length)) for x in tensors]
            batches = [x.movedim(dim - 1, 0) for x in batches]
        outputs.append(function(*batches).flatten(0, 1))
    return torch.cat(outputs).index_select(0, inverse)[None]


class Edges(NamedTuple):
    """first[k], last[k]: positions of the documents' tokens number k, counted from their start or their end."""

    first: list[Tensor]
    last: list[Tensor]


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def edge_plan(lengths: tuple[int, ...], width: int, device: torch.device) -> Edges:
    """The documents' first and last `width` tokens; a document of fewer appears in fewer lists."""
    offsets = list(accumulate(lengths, initial=0))
    spans = list(pairwise(offsets))
    first = [[start + k for start, end in spans if start + k < end] for k in range(width)]
    last = [[end - 1 - k for start, end in spans if start <= end - 1 - k] for k in range(width)]
    return Edges(
        *([_on(device, torch.tensor(positions, dtype=torch.long)) for positions in side] for side in (first, last))
    )


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def cumulative(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Cumulative lengths, int32 [documents + 1]. Cached: flash-linear-attention keys its index cache on identity."""
    return _on(device, torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32))


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def document_index(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """The document number of each token, int32 [1, T]."""
    numbers = torch.arange(len(lengths), dtype=torch.int32, device="cpu")
    return _on(device, numbers.repeat_interleave(torch.tensor(lengths, device="cpu"))[None])


def _on(device: torch.device, made: Tensor) -> Tensor:
    """A copy that the host does not wait for."""
    return made.to(device, non_blocking=True)
