"""Documents -> rows -> micro-batches, the same number on every rank.

A document is one rollout, prompt and completion. `plan` is a pure function of what every rank knows (all
rollouts), so all ranks compute the same plan and build their own share of it without a word to each other.

Shape suffixes: B rows of one micro-batch, T positions of a row, K positions whose logits are needed.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from posttrain.config import PackingConf, PackingMode
from posttrain.models.gdn_packing import boundaries
from posttrain.records import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A rollout with what the loss needs of it."""

    rollout: Rollout
    advantage: float
    weight: float  # of each completion token in the loss; 0 leaves the document out

    def __len__(self) -> int:
        return len(self.rollout)


Plan = list[list[list[Document]]]  # [rank][micro-batch][document]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """One micro-batch. The logits at `kept_K` predict `targets_BK`; `weights_BK` is 0 where there is no target."""

    inputs: dict[str, torch.Tensor | int | tuple | bool]  # keyword arguments of the model call
    kept_K: torch.Tensor  # positions that go through the LM head, for every row
    targets_BK: torch.Tensor  # token ids
    weights_BK: torch.Tensor  # fp32
    advantages_BK: torch.Tensor  # fp32
    sampled_logprobs_BK: torch.Tensor  # fp32, by the sampler

    def model_inputs(self) -> dict[str, torch.Tensor | int | tuple | bool]:
        return {**self.inputs, "logits_to_keep": self.kept_K}


def plan(documents: Sequence[Document], spare: Document, cfg: PackingConf, ranks: int) -> Plan:
    """Split documents into micro-batches of at most `cfg.tokens_per_row` tokens, equally many (not 0) on each rank.

    A longer document gets a micro-batch of its own. Ranks with fewer micro-batches are filled up with `spare`, a
    short document of weight 0, so that every rank takes part in every collective.
    """
    shares = _rows_per_rank(_fill(documents, cfg), ranks, cfg)
    count = max(1, *map(len, shares))
    return [share + [[spare]] * (count - len(share)) for share in shares]


def build(row: list[Document], cfg: PackingConf, pad_id: int, device: torch.device) -> PackedRow:
    """The tensors of one micro-batch: one row of all documents (thd), or one row a document (padded)."""
    return (_padded_row if cfg.mode is PackingMode.padded else _thd_row)(row, cfg, pad_id, device)


def statistics(plan: Plan, cfg: PackingConf) -> dict[str, float]:
    """Real over computed tokens, and the busiest rank's computed tokens over the mean rank's."""
    computed = [sum(_computed_tokens(row, cfg) for row in share) for share in plan]
    real = sum(len(document) for share in plan for row in share for document in row if document.weight)
    return {
        **({"packing/fill": real / sum(computed)} if real else {}),  # nothing to train on: all is spare
        "packing/rank_imbalance": max(computed) * len(computed) / sum(computed),
        "packing/micro_batches": len(plan[0]),
    }


def _computed_tokens(row: list[Document], cfg: PackingConf) -> int:
    if cfg.mode is PackingMode.padded:
        return len(row) * _round_up(max(map(len, row)), cfg)
    return _round_up(sum(map(len, row)), cfg)


def _round_up(length: int, cfg: PackingConf) -> int:
    return length + -length % cfg.pad_multiple


def _fill(documents: Sequence[Document], cfg: PackingConf) -> list[list[Document]]:
    longest_first = sorted(documents, key=len, reverse=True)
    rows: list[list[Document]] = []
    if cfg.mode is PackingMode.padded:  # neighbours in length share a micro-batch, which costs its longest times B
        for document in longest_first:
            if rows and len(rows[-1][0]) * (len(rows[-1]) + 1) <= cfg.tokens_per_row:
                rows[-1].append(document)
            else:
                rows.append([document])
        return rows
    room: list[int] = []  # best-fit-decreasing
    for document in longest_first:
        fitting = [i for i, left in enumerate(room) if left >= len(document)]
        if fitting:
            best = min(fitting, key=room.__getitem__)
            rows[best].append(document)
            room[best] -= len(document)
        else:
            rows.append([document])
            room.append(cfg.tokens_per_row - len(document))
    return rows


def _rows_per_rank(rows: list[list[Document]], ranks: int, cfg: PackingConf) -> Plan:
    """Costliest rows first, each to the rank with the fewest tokens so far."""
    shares: Plan = [[] for _ in range(ranks)]
    load = [(0, rank) for rank in range(ranks)]
    for row in sorted(rows, key=lambda row: _computed_tokens(row, cfg), reverse=True):
        tokens, rank = heapq.heappop(load)
        shares[rank].append(row)
        heapq.heappush(load, (tokens + _computed_tokens(row, cfg), rank))
    return shares


def _thd_row(row: list[Document], cfg: PackingConf, pad_id: int, device: torch.device) -> PackedRow:
    lengths = [len(document) for document in row]
    total = sum(lengths)
    padding = _round_up(total, cfg) - total  # one document of its own, never many of one token
    ids = [i for d in row for i in (*d.rollout.prompt_ids, *d.rollout.completion_ids)] + [pad_id] * padding
    positions, columns = [], []
    for start, document in zip(itertools.accumulate(lengths[:-1], initial=0), row, strict=True):
        first = start + len(document.rollout.prompt_ids) - 1  # these logits predict the first completion token
        positions += range(first, first + len(document.rollout.completion_ids))
        columns += _columns(document)
    inputs = boundaries([*lengths, padding] if padding else lengths, device)
    inputs["input_ids"] = torch.tensor([ids], device=device)
    return _row(inputs, positions, [columns], device)


def _padded_row(row: list[Document], cfg: PackingConf, pad_id: int, device: torch.device) -> PackedRow:
    lengths = [len(document) for document in row]
    width = _round_up(max(lengths), cfg)
    ids = [[*d.rollout.prompt_ids, *d.rollout.completion_ids] + [pad_id] * (width - len(d)) for d in row]
    spans = [(len(d.rollout.prompt_ids) - 1, len(d) - 1) for d in row]
    first, last = min(s for s, _ in spans), max(e for _, e in spans)
    empty = (pad_id, 0.0, 0.0, 0.0)
    columns = [
        [empty] * (start - first) + _columns(document) + [empty] * (last - end)
        for document, (start, end) in zip(row, spans, strict=True)
    ]
    inputs = {
        "input_ids": torch.tensor(ids, device=device),
        "attention_mask": torch.tensor([[1] * n + [0] * (width - n) for n in lengths], device=device),
        "position_ids": torch.arange(width, device=device).expand(len(row), -1),
        "use_cache": False,
    }
    return _row(inputs, range(first, last), columns, device)


def _columns(document: Document) -> list[tuple[int, float, float, float]]:
    """(target, weight, advantage, sampler's logprob) of each completion token."""
    rollout = document.rollout
    return [
        (token, document.weight, document.advantage, logprob)
        for token, logprob in zip(rollout.completion_ids, rollout.logprobs, strict=True)
    ]


def _row(inputs: dict, positions: Sequence[int], columns_BK: list[list[tuple]], device) -> PackedRow:
    targets, weights, advantages, sampled = (
        torch.tensor([[column[part] for column in row] for row in columns_BK], dtype=dtype, device=device)
        for part, dtype in enumerate((torch.int64, torch.float32, torch.float32, torch.float32))
    )
    return PackedRow(
        inputs=inputs,
        kept_K=torch.tensor(list(positions), device=device),
        targets_BK=targets,
        weights_BK=weights,
        advantages_BK=advantages,
        sampled_logprobs_BK=sampled,
    )
