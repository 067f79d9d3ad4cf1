"""Which architectures can be sampled from with padding and a cache.

On tiny models of the same layer classes, fp32 on the CPU: the sampler's own logprobs of prompts of different lengths,
padded in one batch and one prompt a batch, against plain forwards of each sequence. A figure is the largest difference
in nats. Exit status 1 if a named one cannot be sampled from in one batch.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from posttrain.models.survey.tables import one_line, progress, show, summary, table
from posttrain.models.survey.tiny_models import Builder
from posttrain.rollout.probe import NEW, PROMPTS, TOLERANCE, reported

VERDICTS = ("samples", "one prompt a batch", "refused", "not built")


@dataclass(slots=True, kw_only=True)
class Check:
    """What was found about one architecture; a reason wherever there is no figure."""

    architecture: str
    padded: float | None = None
    alone: float | None = None
    verdict: str = "samples"  # or another of VERDICTS
    reason: str | None = None


def look(result: Check, build: Builder) -> None:
    """Fill in the result for the tiny model that `build` makes."""
    try:
        model = build()
    # Of whatever kind: the reason is what the table shows.
    except Exception as error:
        result.verdict, result.reason = "not built", one_line(error)
        return
    found = [reported(model, padded) for padded in (True, False)]
    result.padded, result.alone = (value if isinstance(value, float) else None for value in found)
    right = [isinstance(value, float) and value <= TOLERANCE[torch.float32] for value in found]
    result.verdict = "samples" if right[0] else "one prompt a batch" if right[1] else "refused"
    if result.verdict == "refused":
        why = found[0] if isinstance(found[0], str) else found[1]
        result.reason = why if isinstance(why, str) else "its logprobs are others without a cache and positions"


def text(checks: list[Check], markdown: bool) -> str:
    """The table: aligned for a terminal, or in Markdown."""
    rows = [["architecture", "padded", "one prompt", "verdict"]]
    for result in checks:
        figures = ["" if value is None else f"{value:.1e}" for value in (result.padded, result.alone)]
        verdict = result.verdict if result.reason is None else f"{result.verdict}: {result.reason}"
        rows.append([result.architecture, *figures, verdict])
    return table(rows, markdown) + "\n\n" + summary([result.verdict for result in checks], VERDICTS)


def main(args: argparse.Namespace, models: dict[str, Builder]) -> int:
    """Print the table of `models`. Returns the exit status."""
    checks = [Check(architecture=name) for name in models]
    for result in progress(checks, "sampling"):
        look(result, models[result.architecture])
    show(args, checks, text, prompts=PROMPTS, new_tokens=NEW)
    named = args.path or args.architectures
    return int(bool(named) and any(result.verdict != "samples" for result in checks))
