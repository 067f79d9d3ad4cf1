"""Packing and balance on simulated length mixes, and what one giant document costs. No weights, no processes.

    python benchmarks/packing.py

max/mean     FLOPs of the busiest rank over the mean rank's, padding included
rows first   the same for the other order: all documents into rows, then rows to ranks
in step      as max/mean, if ranks waited for each other after every micro-batch
largest      FLOPs of the costliest document over the mean rank's
padding %    of the computed tokens; rows are padded to multiples of 64
rows         of one rank (micro-batches)
above least  how many of them more than any packing and any split must have
seconds      of one core, for packing and balancing
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from posttrain.config import PackingConf, PackingMode
from posttrain.flops import PassCost
from posttrain.packing import planning
from posttrain.records import Document, Plan, Rollout, Row

MIXES: dict[str, Callable[[random.Random], float]] = {  # a length, as a part of the budget
    "log-normal": lambda draw: draw.lognormvariate(math.log(0.12), 1.0),
    "bimodal": lambda draw: draw.gauss(0.07, 0.015) if draw.random() < 0.5 else draw.gauss(0.73, 0.1),
    "uniform": lambda draw: draw.random(),
}


def documents(lengths: Sequence[int]) -> list[Document]:
    """A prompt of a quarter of each length, and the rest completion. Only their lengths matter here."""
    return [
        Document(rollout=rollout(n, length), advantage=1.0, weight=1.0, index=n) for n, length in enumerate(lengths)
    ]


def rollout(group: int, length: int) -> Rollout:
    """Of `bytes`, a number in one byte: 100,000 documents of tuples would take gigabytes."""
    prompt, zeros = length // 4, bytes(length)
    return Rollout(
        group=group,
        sample=0,
        ids=zeros,
        trained=bytes(prompt) + b"\1" * (length - prompt),
        logprobs=zeros,
        versions=zeros,
        turns=((prompt, length),),
        finish_reason="stop",
    )


def draw(mix: str, count: int, budget: int, seed: int) -> list[int]:
    generator = random.Random(f"{mix} {count} {seed}")
    return [min(budget, max(4, round(MIXES[mix](generator) * budget))) for _ in range(count)]


def without_giants(lengths: list[int], ranks: int, cost: PassCost) -> list[int]:
    """Cut the longest until no document costs more than half a rank's share."""
    while max(one := [cost([length], length - length // 4) for length in lengths]) > sum(one) / ranks / 2:
        cut = int(0.97 * max(lengths))
        lengths = [min(length, cut) for length in lengths]
    return lengths


def least_rows(lengths: Sequence[int], budget: int) -> int:
    """No packing has fewer rows (Martello and Toth's bound L2). A document above the budget has a row to itself."""
    fitting = [length for length in lengths if length <= budget]
    bounds = []
    for small in range(0, budget // 2, budget // 16):  # what is at least this long cannot join a document in `alone`
        alone = sum(length > budget - small for length in fitting)
        large = [length for length in fitting if budget / 2 < length <= budget - small]
        rest = sum(length for length in fitting if small <= length <= budget / 2)
        bounds.append(alone + len(large) + max(0, math.ceil((rest + sum(large)) / budget - len(large))))
    return len(lengths) - len(fitting) + max(bounds)


def imbalance(loads: Sequence[float]) -> float:
    return max(loads) * len(loads) / sum(loads)


def in_step(plan: Plan, cfg: PackingConf, cost: PassCost) -> float:
    """As `imbalance`, if ranks waited for each other after every micro-batch."""
    each = [[planning._row_cost(row, cfg, cost) for row in share] for share in plan]
    return sum(map(max, zip(*each, strict=True))) * len(plan) / sum(map(sum, each))


def rows_first(docs: Sequence[Document], cfg: PackingConf, ranks: int, cost: PassCost) -> float:
    """The imbalance of the other order: pack all documents, then balance rows."""

    def row_cost(row: Row) -> float:
        return planning._row_cost(row, cfg, cost)

    shares = planning._deal(planning._best_fit(docs, cfg.tokens_per_row), row_cost, ranks)
    return imbalance([sum(map(row_cost, share)) for share in shares])


def measure(lengths: list[int], ranks: int, cfg: PackingConf, cost: PassCost) -> dict[str, float]:
    docs = documents(lengths)
    one = [cost([length], length - length // 4) for length in lengths]
    least = math.ceil(least_rows(lengths, cfg.tokens_per_row) / ranks)
    began = time.process_time()
    plan = planning.plan(docs, planning.spare(docs[0].rollout), cfg, ranks, cost)
    seconds = time.process_time() - began
    found = planning.statistics([plan], cfg, cost)
    return {
        "max/mean": found["packing/rank_imbalance"],
        "rows first": rows_first(docs, cfg, ranks, cost),
        "in step": in_step(plan, cfg, cost),
        "largest": max(one) / sum(one) * ranks,
        "padding %": 100 * (1 - found["packing/fill"]),
        "rows": found["packing/micro_batches"],
        "above least": found["packing/micro_batches"] - least,
        "seconds": seconds,
    }


def table(title: str, cases: Iterable[tuple[str, int, list[dict[str, float]]]]) -> None:
    """A line a case: its first column, ranks, and the largest of each figure over its draws."""
    print(f"\n{title}")
    for n, (name, ranks, draws) in enumerate(cases):
        if n == 0:
            print("".join(f"{cell:>12}" for cell in ("", "ranks", *draws[0])))
        worst = {key: max(found[key] for found in draws) for key in draws[0]}
        cells = (f"{value:.0f}" if isinstance(value, int) else f"{value:.3f}" for value in worst.values())
        print("".join(f"{cell:>12}" for cell in (name, ranks, *cells)), flush=True)


def main() -> None:
    with torch.device("meta"):  # Qwen3-4B: attention costs as much as the projections at some 20,000 tokens
        shape = Qwen3Config(
            vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
            num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
        )  # fmt: skip
        cost = planning.document_cost(AutoModelForCausalLM.from_config(shape))
    short = PackingConf(mode=PackingMode.thd, tokens_per_row=4096, pad_multiple=64)
    print(__doc__)
    table(
        "100,000 documents, 4096 tokens a row",
        ((mix, 8, [measure(draw(mix, 100_000, 4096, 0), 8, short, cost)]) for mix in MIXES),
    )
    for budget in (4096, 32768):
        cfg = replace(short, tokens_per_row=budget)
        table(
            f"16 documents a rank, {budget} tokens a row, the worst of some draws",
            (
                (mix, ranks, [
                    measure(without_giants(draw(mix, 16 * ranks, budget, seed), ranks, cost), ranks, cfg, cost)
                    for seed in range(max(1, 128 // ranks))
                ])
                for mix in MIXES for ranks in (8, 64, 256, 1024)
            ),
        )  # fmt: skip
    others = draw("log-normal", 64 * 16 - 1, 4096, 0)
    table(
        "64 ranks x 16 log-normal documents, one a giant: max/mean is at least `largest`, padding aside",
        (
            (f"{giant:,}", 64, [measure([*others, giant], 64, short, cost)])
            for giant in (4096, 8192, 16384, 32768, 65536)
        ),
    )


if __name__ == "__main__":
    main()
