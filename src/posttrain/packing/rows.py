"""The tensors of a micro-batch, and what was computed with them back to documents.

Shape suffixes: B rows of one micro-batch, T positions of a row, K positions whose logits are needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from posttrain.config import PackingConf, PackingMode
from posttrain.flops import PassCost
from posttrain.models.gdn_packing import boundaries
from posttrain.packing.planning import computed_lengths, plan
from posttrain.records import Document, Packed, PackedRow, Row

# Target, document, weight, advantage, and the sampler's logprob of one predicted token.
Column = tuple[int, int, float, float, float]
COLUMN_DTYPES = (torch.int64, torch.int64, torch.float32, torch.float32, torch.float32)


def pack(
    documents: Sequence[Document],
    spare: Document,
    cfg: PackingConf,
    cost: PassCost,
    pad_id: int,
    device: torch.device,
) -> Packed:
    """Plan the documents over all ranks, see `plan`, and build this rank's micro-batches."""
    planned = plan(documents, spare, cfg, dist.get_world_size(), cost)
    rows = [build(row, cfg, pad_id, device) for row in planned[dist.get_rank()]]
    return Packed(plan=planned, rows=rows)


def build(row: Row, cfg: PackingConf, pad_id: int, device: torch.device) -> PackedRow:
    """The tensors of one micro-batch: one row of all documents (thd), or one row a document (padded)."""
    return (_padded_row if cfg.mode is PackingMode.padded else _thd_row)(row, cfg, pad_id, device)


def unpack(values_BK: torch.Tensor, row: Row, cfg: PackingConf) -> dict[int, torch.Tensor]:
    """What was computed for a row of `plan`: values of each document's trained tokens, by its index, without spares."""
    places = [_predicting(document) for document in row]
    if cfg.mode is PackingMode.padded:
        column = {position: k for k, position in enumerate(_kept_by_all(row))}
        parts = [values_K[[column[p] for p in own]] for values_K, own in zip(values_BK, places, strict=True)]
    else:
        parts = list(values_BK[0].split([len(own) for own in places]))
    return {document.index: part for document, part in zip(row, parts, strict=True) if document.index >= 0}


def not_finite(token_losses: Sequence[torch.Tensor], share: Sequence[Row], cfg: PackingConf) -> list[int]:
    """The groups, each once, of this rank's documents with a token loss, in [B, K] of each row, that is not finite."""
    found = set()
    for losses_BK, row in zip(token_losses, share, strict=True):
        by_document = unpack(losses_BK, row, cfg)
        found |= {d.rollout.group for d in row if d.weight and not by_document[d.index].isfinite().all()}
    return sorted(found)


def _predicting(document: Document) -> list[int]:
    """The positions within a document whose logits predict its trained tokens."""
    return list(itertools.compress(range(-1, len(document) - 1), document.rollout.trained))


def _kept_by_all(row: Row) -> list[int]:
    """The positions that some document of a padded micro-batch needs: every row goes through the head with them."""
    return sorted({position for document in row for position in _predicting(document)})


def _thd_row(row: Row, cfg: PackingConf, pad_id: int, device: torch.device) -> PackedRow:
    lengths = computed_lengths(row, cfg)
    ids = [token for document in row for token in document.rollout.ids]
    ids += [pad_id] * (sum(lengths) - len(ids))
    positions: list[int] = []
    columns: list[Column] = []
    # The padding has a start too, but no document.
    starts = itertools.accumulate(lengths, initial=0)
    for number, (document, start) in enumerate(zip(row, starts, strict=False)):
        positions += [start + position for position in _predicting(document)]
        columns += _columns(document, number)
    inputs = boundaries(lengths, device)
    inputs["input_ids"] = torch.tensor([ids], device=device)
    return _row(inputs, positions, [columns], len(row), device)


def _padded_row(row: Row, cfg: PackingConf, pad_id: int, device: torch.device) -> PackedRow:
    lengths = [len(document) for document in row]
    width, *_ = computed_lengths(row, cfg)
    positions = _kept_by_all(row)
    columns = []
    for number, document in enumerate(row):
        own = dict(zip(_predicting(document), _columns(document, number), strict=True))
        nothing = (pad_id, number, 0.0, 0.0, 0.0)
        columns.append([own.get(position, nothing) for position in positions])
    ids = [[*document.rollout.ids] + [pad_id] * (width - len(document)) for document in row]
    inputs = {
        "input_ids": torch.tensor(ids, device=device),
        "attention_mask": torch.tensor([[1] * n + [0] * (width - n) for n in lengths], device=device),
        # Padding has the last position of the longest document: the model may have no more.
        "position_ids": torch.arange(width, device=device).clamp(max=max(lengths) - 1).expand(len(row), -1),
        "use_cache": False,
    }
    return _row(inputs, positions, columns, len(row), device)


def _columns(document: Document, number: int) -> list[Column]:
    """One for each trained token."""
    rollout = document.rollout
    sampled = itertools.compress(zip(rollout.ids, rollout.logprobs, strict=True), rollout.trained)
    return [(token, number, document.weight, document.advantage, logprob) for token, logprob in sampled]


def _row(
    inputs: dict, positions: Sequence[int], columns_BK: list[list[Column]], documents: int, device: torch.device
) -> PackedRow:
    targets, document, weights, advantages, sampled = (
        torch.tensor([[column[part] for column in row] for row in columns_BK], dtype=dtype, device=device)
        for part, dtype in enumerate(COLUMN_DTYPES)
    )
    return PackedRow(
        inputs=inputs,
        kept_K=torch.tensor(positions, dtype=torch.int64, device=device),
        targets_BK=targets,
        weights_BK=weights,
        advantages_BK=advantages,
        sampled_logprobs_BK=sampled,
        document_BK=document,
        documents=documents,
    )
