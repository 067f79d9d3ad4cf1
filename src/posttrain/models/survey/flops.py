"""Which architectures have their FLOPs counted, and how the count compares with torch's FLOP counter.

On tiny models of the same layer classes, fp32 on the CPU: the forward FLOPs of one document, counted from the
modules, and those that the counter sees while the model runs (docs/flops.md says how it is made to see the same).
Exit status 1 if a count differs, or if a named one is refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from posttrain.flops import counter, size
from posttrain.models.survey.tables import one_line, progress, show, summary, table
from posttrain.models.survey.tiny_models import Builder

LENGTHS = (70,)  # more than a window or chunk of a tiny model
LOGITS = 7
VERDICTS = ("counted", "WRONG", "refused", "not built")


@dataclass(slots=True, kw_only=True)
class Check:
    """What was found about one architecture; a reason wherever a figure is missing."""

    architecture: str
    counted: float | None = None
    counter: float | None = None
    convention: str | None = None  # of attention, in both
    parts: dict[str, float] = field(default_factory=dict)
    verdict: str = "counted"  # or another of VERDICTS
    reason: str | None = None


def compare(result: Check, build: Builder) -> None:
    """Fill in the result for the tiny model that `build` makes."""
    try:
        model = build()
    # Of whatever kind: the reason is what the table shows.
    except Exception as error:
        result.verdict, result.reason = "not built", one_line(error)
        return
    _choose_two_experts(model)
    try:
        sized = size(model)
    except ValueError as error:
        result.verdict, result.reason = "refused", str(error)
        return
    try:
        logits = LOGITS if counter.takes_logits_to_keep(model) else None
        result.counter, seen = counter.count(model, LENGTHS, logits)
        logits = sum(LENGTHS) if logits is None else logits
        cost = sized.forward_cost
        result.convention = ("useful" if seen else "dense") if cost.per_pair else "none"
        dense = result.convention == "dense"
        result.counted = cost.dense(LENGTHS, logits) if dense else cost(LENGTHS, logits)
        result.parts = {name: part(LENGTHS, logits) for name, part in sized.parts.items()}
        if result.counted != result.counter:
            result.verdict, result.reason = "WRONG", "the count differs from the counter's"
    except Exception as error:
        result.verdict, result.reason = "WRONG", f"counted but not compared: {one_line(error)}"


def _choose_two_experts(model: nn.Module) -> None:
    """In a tiny model each token passes all experts, which would hide how many they are."""
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if isinstance(getattr(module, "top_k", None), int) and type(module).__name__ not in counter.EVERY_EXPERT:
            module.top_k = min(module.top_k, 2)


def text(checks: list[Check], markdown: bool) -> str:
    """The table: aligned for a terminal, or in Markdown."""
    rows = [["architecture", "counted", "counter", "error", "attention", "verdict"]]
    for c in checks:
        figures = [f"{figure:,.0f}" if figure is not None else "" for figure in (c.counted, c.counter)]
        error = f"{abs(c.counted / c.counter - 1):.2%}" if c.counted and c.counter else ""
        verdict = c.verdict if c.reason is None else f"{c.verdict}: {c.reason}"
        rows.append([c.architecture, *figures, error, c.convention or "", verdict])
    return table(rows, markdown) + "\n\n" + summary([c.verdict for c in checks], VERDICTS)


def main(args: argparse.Namespace, models: dict[str, Builder]) -> int:
    """Print the table of `models`. Returns the exit status."""
    checks = [Check(architecture=name) for name in models]
    for result in progress(checks, "counting"):
        compare(result, models[result.architecture])
    show(args, checks, text, lengths=LENGTHS)
    named = args.path or args.architectures
    verdicts = {result.verdict for result in checks}
    return int("WRONG" in verdicts or bool(named and verdicts != {"counted"}))
