"""Which document goes to which rank, micro-batch and row.

A pure function of what every rank knows (all documents), so all ranks compute the same plan and build their own
share of it without a word to each other. 100,000 documents take about a second on one core (benchmarks/packing.py).

First documents to ranks, by FLOPs, then each rank's documents into rows, by tokens: rows are too few and too uneven
to balance ranks with. Of the libraries on PyPI (binpacking 2.0.1, prtpy 0.8.3, numberpartitioning 0.0.2) the first
two took 5 and 8 s to pack 10,000 documents and over 25 s for 100,000, the third only balances; and balancing, by the
same greedy rule and as evenly as they do, is the heap of `_deal`.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

from torch import nn
from transformers import PreTrainedModel

from posttrain.config import PackingConf, PackingMode
from posttrain.errors import UserError
from posttrain.flops import PassCost, size
from posttrain.records import Document, Plan, Problem, Rollout, Row


def spare(rollout: Rollout) -> Document:
    """The shortest document there is, the first token of a rollout said twice, of weight 0."""
    token = rollout.ids[:1]
    short = Rollout.one_turn(
        prompt_ids=token, completion_ids=token, logprobs=(0.0,), finish_reason="stop", group=rollout.group
    )
    return Document(rollout=short, advantage=0.0, weight=0.0, index=-1)


def plan(documents: Sequence[Document], spare: Document, cfg: PackingConf, ranks: int, cost: PassCost) -> Plan:
    """Split documents into micro-batches of at most `cfg.tokens_per_row` tokens, equally many (not 0) on each rank.

    A longer document gets a micro-batch of its own. Ranks have the same `cost` as nearly as documents allow, and their
    costliest micro-batch first: under FSDP ranks wait for each other in every one. Ranks with fewer are filled up with
    `spare`, so that every rank takes part in every collective.
    """

    def row_cost(row: Row) -> float:
        return _row_cost(row, cfg, cost)

    # Padded rows of similar length need all documents to choose from, so rows are made before they are dealt.
    if cfg.mode is PackingMode.padded:
        shares = _deal(_alike(documents, cfg.tokens_per_row), row_cost, ranks)
    else:
        by_rank = _deal(documents, lambda document: _cost(document, cost), ranks)
        shares = [_best_fit(share, cfg.tokens_per_row) for share in by_rank]
    count = max(1, *map(len, shares))
    return [sorted(share, key=row_cost, reverse=True) + [[spare]] * (count - len(share)) for share in shares]


def statistics(plans: Sequence[Plan], cfg: PackingConf, cost: PassCost, refused: int = 0) -> dict[str, float]:
    """Real over computed tokens, the busiest rank's FLOPs over the mean rank's, micro-batches of a rank.

    Over the plans of all optimizer steps, which ranks end together: the busiest is found for each. `refused`, how many
    documents were left out because they exceed `longest`, is reported where there are any.
    """
    rows = [row for plan in plans for share in plan for row in share]
    real = sum(len(document) for row in rows for document in row if document.weight)
    loads = [[sum(_row_cost(row, cfg, cost) for row in share) for share in plan] for plan in plans]
    return {
        # Without a document to train on all is spare.
        **({"packing/fill": real / sum(sum(computed_lengths(row, cfg)) for row in rows)} if real else {}),
        "packing/rank_imbalance": sum(map(max, loads)) * len(loads[0]) / sum(map(sum, loads)),
        "packing/micro_batches": sum(len(plan[0]) for plan in plans),
        **({"packing/refused": refused} if refused else {}),
    }


def longest(model: PreTrainedModel) -> float:
    """Tokens of the longest document that the model has positions for; infinite where its config names no limit."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return math.inf if limit is None else limit


def short_of_room(prompts: Sequence[Problem], max_new_tokens: int, limit: float) -> list[str]:
    """A warning if some prompts and `max_new_tokens` exceed `limit`, see `longest`. Raises UserError if all do."""
    lengths = sorted(len(prompt.prompt_ids) for prompt in prompts)
    exceeding = sum(length + max_new_tokens > limit for length in lengths)
    if not exceeding:
        return []
    what = f"rollout.max_new_tokens={max_new_tokens} and the model's {limit} positions"
    least, most = (max(0, limit - length) for length in (lengths[-1], lengths[0]))
    if exceeding < len(lengths):
        return [f"{what}: too long beside {exceeding} of {len(lengths)} prompts, whose longest samples will be refused"]
    advice = f"type rollout.max_new_tokens={least or most} or less" if most else "take a model of more positions"
    raise UserError(f"{what}: no prompt leaves that many (they have {lengths[0]} to {lengths[-1]} tokens): {advice}")


def document_cost(model: PreTrainedModel) -> PassCost:
    """Forward FLOPs, exact where `flops.size` knows the model; else an estimate to balance with, for any model.

    The estimate: 2 a weight and token, all experts included, and 4 a channel and query-key pair in each layer.
    """
    try:
        return size(model).forward_cost
    # The count refuses the model, or the model keeps to other rules.
    except (ValueError, AttributeError, TypeError):
        config = model.config.get_text_config(decoder=True)
        layers, width = (getattr(config, name, None) or 1 for name in ("num_hidden_layers", "hidden_size"))
        looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        weights = [weight for weight in model.parameters() if weight.ndim > 1 and id(weight) not in looked_up]
        return PassCost(2 * sum(weight.numel() for weight in weights), 0, {None: 4 * width * layers})


def _cost(document: Document, cost: PassCost) -> float:
    return cost((len(document),), document.rollout.trained_tokens)


def _row_cost(row: Row, cfg: PackingConf, cost: PassCost) -> float:
    return cost(computed_lengths(row, cfg), sum(document.rollout.trained_tokens for document in row))


def computed_lengths(row: Row, cfg: PackingConf) -> list[int]:
    """Tokens of each document as the model sees them: padded to the longest, or with a last document of padding."""
    lengths = [len(document) for document in row]
    if cfg.mode is PackingMode.padded:
        longest = max(lengths)
        return [longest + -longest % cfg.pad_multiple] * len(row)
    # Padding is a document of its own: many of one token would exceed what kernels take.
    padding = -sum(lengths) % cfg.pad_multiple
    return [*lengths, padding] if padding else lengths


def _deal(items: Sequence, cost: Callable[..., float], ranks: int) -> list[list]:
    """The costliest first, each to the rank with the least so far."""
    shares: list[list] = [[] for _ in range(ranks)]
    load = [(0.0, rank) for rank in range(ranks)]
    costs = list(map(cost, items))
    for n in sorted(range(len(items)), key=costs.__getitem__, reverse=True):
        least, rank = load[0]
        shares[rank].append(items[n])
        heapq.heapreplace(load, (least + costs[n], rank))
    return shares


def _best_fit(documents: Sequence[Document], budget: int) -> list[Row]:
    """Best fit decreasing: the longest first, each into the fullest row that still has room for it."""
    rows: list[Row] = []
    # Rows by their tokens of room, and the sizes of room that some row has, ascending.
    with_room: dict[int, list[Row]] = {}
    rooms: list[int] = []
    for document in sorted(documents, key=len, reverse=True):
        length = len(document)
        at = bisect_left(rooms, length)
        if at < len(rooms):
            room = rooms[at]
            row = with_room[room].pop()
            if not with_room[room]:
                del rooms[at]
        else:
            room, row = budget, []
            rows.append(row)
        row.append(document)
        left = room - length
        if left > 0:
            alike = with_room.setdefault(left, [])
            if not alike:
                insort(rooms, left)
            alike.append(row)
    return rows


def _alike(documents: Sequence[Document], budget: int) -> list[Row]:
    """Neighbours in length: a padded micro-batch costs its longest document times their number."""
    rows: list[Row] = []
    for document in sorted(documents, key=len, reverse=True):
        if rows and len(rows[-1][0]) * (len(rows[-1]) + 1) <= budget:
            rows[-1].append(document)
        else:
            rows.append([document])
    return rows
