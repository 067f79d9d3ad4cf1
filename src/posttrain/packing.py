"""Documents -> rows -> micro-batches -> tensors.

    plan            the documents of each rank's micro-batches, equally many on every rank
    build           the tensors of one micro-batch; boundaries are made here, on the host, and travel with the call
    unpack          from the tensors back to documents
    statistics      what the plan costs

Shape suffixes: B rows of one micro-batch, T positions of a row, K positions whose logits are needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from posttrain.config import PackingConf, PackingMode
from posttrain.models.gdn_packing import boundaries
from posttrain.packing_plan import (
    Document,
    Row,
    computed_lengths,
    document_cost,
    longest,
    plan,
    short_of_room,
    spare,
    statistics,
)

__all__ = [
    "Document",
    "PackedRow",
    "build",
    "document_cost",
    "longest",
    "not_finite",
    "plan",
    "short_of_room",
    "spare",
    "statistics",
    "unpack",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """One micro-batch. The logits at `kept_K` predict `targets_BK`; `weights_BK` is 0 where there is no target."""

    inputs: dict[str, torch.Tensor | int | tuple | bool]  # keyword arguments of the model call
    kept_K: torch.Tensor  # positions that go through the LM head, for every row
    targets_BK: torch.Tensor  # token ids
    weights_BK: torch.Tensor  # fp32
    advantages_BK: torch.Tensor  # fp32
    sampled_logprobs_BK: torch.Tensor  # fp32, by the sampler
    document_BK: torch.Tensor  # int64, which of the micro-batch's documents a position belongs to
    documents: int
    old_logprobs_BK: torch.Tensor | None = None  # by the policy that sampled; None: by the one that is updated
    reference_logprobs_BK: torch.Tensor | None = None  # None: no KL penalty

    def model_inputs(self) -> dict[str, torch.Tensor | int | tuple | bool]:
        return {**self.inputs, "logits_to_keep": self.kept_K}


def build(row: Row, cfg: PackingConf, pad_id: int, device: torch.device) -> PackedRow:
    """The tensors of one micro-batch: one row of all documents (thd), or one row a document (padded)."""
    return (_padded_row if cfg.mode is PackingMode.padded else _thd_row)(row, cfg, pad_id, device)


def unpack(values_BK: torch.Tensor, row: Row, cfg: PackingConf) -> dict[int, torch.Tensor]:
    """What was computed for a row of `plan`: each completion's values, by its document's index. Spares are left out."""
    spans = _spans(row)
    if cfg.mode is PackingMode.padded:
        first = min(start for start, _ in spans)
        parts = [values_K[start - first : end - first] for values_K, (start, end) in zip(values_BK, spans, strict=True)]
    else:
        parts = values_BK[0].split([end - start for start, end in spans])
    return {document.index: part for document, part in zip(row, parts, strict=True) if document.index >= 0}


def not_finite(token_losses: Sequence[torch.Tensor], share: Sequence[Row], cfg: PackingConf) -> list[int]:
    """Groups, each once, of this rank's documents of which a token's loss, in [B, K] of each row, is not finite."""
    found = set()
    for losses_BK, row in zip(token_losses, share, strict=True):
        by_document = unpack(losses_BK, row, cfg)
        found |= {d.rollout.group for d in row if d.weight and not by_document[d.index].isfinite().all()}
    return sorted(found)


def _spans(row: Row) -> list[tuple[int, int]]:
    """The positions, within each document, whose logits predict its completion."""
    return [(len(d.rollout.prompt_ids) - 1, len(d) - 1) for d in row]


def _thd_row(row: Row, cfg: PackingConf, pad_id: int, device: torch.device) -> PackedRow:
    lengths = computed_lengths(row, cfg)
    ids = [i for d in row for i in (*d.rollout.prompt_ids, *d.rollout.completion_ids)]
    ids += [pad_id] * (sum(lengths) - len(ids))
    positions, columns = [], []
    starts = itertools.accumulate(lengths, initial=0)  # the padding's too, which has no document
    for n, (document, (first, end), start) in enumerate(zip(row, _spans(row), starts, strict=False)):
        positions += range(start + first, start + end)
        columns += _columns(document, n)
    inputs = boundaries(lengths, device)
    inputs["input_ids"] = torch.tensor([ids], device=device)
    return _row(inputs, positions, [columns], len(row), device)


def _padded_row(row: Row, cfg: PackingConf, pad_id: int, device: torch.device) -> PackedRow:
    lengths = [len(document) for document in row]
    width, *_ = computed_lengths(row, cfg)
    ids = [[*d.rollout.prompt_ids, *d.rollout.completion_ids] + [pad_id] * (width - len(d)) for d in row]
    spans = _spans(row)
    first, last = min(s for s, _ in spans), max(e for _, e in spans)
    columns = []
    for n, (document, (start, end)) in enumerate(zip(row, spans, strict=True)):
        empty = (pad_id, n, 0.0, 0.0, 0.0)
        columns.append([empty] * (start - first) + _columns(document, n) + [empty] * (last - end))
    inputs = {
        "input_ids": torch.tensor(ids, device=device),
        "attention_mask": torch.tensor([[1] * n + [0] * (width - n) for n in lengths], device=device),
        # padding has the last position of the longest document: the model may have no more
        "position_ids": torch.arange(width, device=device).clamp(max=max(lengths) - 1).expand(len(row), -1),
        "use_cache": False,
    }
    return _row(inputs, range(first, last), columns, len(row), device)


def _columns(document: Document, number: int) -> list[tuple[int, int, float, float, float]]:
    """(target, document, weight, advantage, sampler's logprob) of each completion token."""
    rollout = document.rollout
    return [
        (token, number, document.weight, document.advantage, logprob)
        for token, logprob in zip(rollout.completion_ids, rollout.logprobs, strict=True)
    ]


def _row(inputs: dict, positions: Sequence[int], columns_BK: list[list[tuple]], documents: int, device) -> PackedRow:
    dtypes = (torch.int64, torch.int64, torch.float32, torch.float32, torch.float32)
    targets, document, weights, advantages, sampled = (
        torch.tensor([[column[part] for column in row] for row in columns_BK], dtype=dtype, device=device)
        for part, dtype in enumerate(dtypes)
    )
    return PackedRow(
        inputs=inputs,
        kept_K=torch.tensor(list(positions), device=device),
        targets_BK=targets,
        weights_BK=weights,
        advantages_BK=advantages,
        sampled_logprobs_BK=sampled,
        document_BK=document,
        documents=documents,
    )
