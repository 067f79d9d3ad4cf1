"""Which architectures can be packed, and what the field's usual call does to them.

On tiny models of the same layer classes and head widths, fp32 on the CPU: three documents in a row with nothing but
position_ids, and then with our boundaries, the kernels in use and the start-up probe. A figure is the largest
difference from each document alone, as a part of the largest value. Exit status 1 if a named one is refused.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from posttrain.errors import UserError
from posttrain.models import gdn_packing
from posttrain.models.packed.probe import WAY_OUT, PackingLeak
from posttrain.models.survey.tables import one_line, progress, show, summary, table
from posttrain.models.survey.tiny_models import Builder
from posttrain.models.thresholds import thresholds

DOCUMENTS = (13, 2, 17)
VERDICTS = ("packs", "refused", "not built")


@dataclass(slots=True, kw_only=True)
class Check:
    """What was found about one architecture; a reason wherever there is no figure."""

    architecture: str
    position_ids_only: float | None = None
    position_ids_error: str | None = None
    difference: float | None = None
    layers: dict[str, int] = field(default_factory=dict)  # stateful and attention classes of the tiny model
    kernels: dict[str, str] = field(default_factory=dict)
    verdict: str = "packs"  # or another of VERDICTS
    reason: str | None = None


def position_ids_only(model: PreTrainedModel) -> float:
    """The leak of upstream's own functions: documents in a row, marked by position_ids, against each alone."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids_T = torch.randint(vocabulary, (sum(DOCUMENTS),), generator=torch.Generator().manual_seed(1))
    positions = [torch.arange(length) for length in DOCUMENTS]

    def logits(ids_T: torch.Tensor, position_ids_T: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids_T[None], position_ids=position_ids_T[None], use_cache=False).logits[0]

    with torch.no_grad():
        alone = [logits(*document) for document in zip(ids_T.split(DOCUMENTS), positions, strict=True)]
        alone_TV, packed_TV = torch.cat(alone), logits(ids_T, torch.cat(positions))
    return float((packed_TV - alone_TV).abs().max() / alone_TV.abs().max())


def check(builders: dict[str, Builder]) -> list[Check]:
    """One result a builder. All the leaks first: `patch` holds for the process and all models that share a function."""
    checks = [Check(architecture=name) for name in builders]
    for result in progress(checks, "position_ids only"):
        try:
            model = builders[result.architecture]()
        # Of whatever kind: the reason is what the table shows.
        except Exception as error:
            result.verdict, result.reason = "not built", _one_line(error)
            continue
        try:
            result.position_ids_only = position_ids_only(model)
        except Exception as error:
            result.position_ids_error = _one_line(error)
    for result in progress([result for result in checks if result.verdict != "not built"], "probe"):
        model = builders[result.architecture]()
        try:
            gdn_packing.patch(model)
            proof = gdn_packing.verify(model, longest=0)
            result.reason = _only_up_to(model)
            result.difference, result.layers, result.kernels = proof.max_difference, proof.layers, proof.kernels
        # A UserError, or whatever an architecture raises that cannot be called so.
        except Exception as error:
            result.verdict, result.reason = "refused", _one_line(error)
    return checks


def _only_up_to(model: PreTrainedModel) -> str | None:
    """The length of a row up to which packing is right, None for any length."""
    limits = thresholds(model.config.get_text_config(decoder=True))
    try:
        gdn_packing.verify(model)
    except PackingLeak:
        name, tokens = min(limits.items(), key=lambda item: item[1])
        return f"in rows of up to {tokens:,} tokens ({name})"
    return None


def _one_line(error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error).removeprefix("packing=thd is unsafe here: ").removesuffix(WAY_OUT).strip()
    return one_line(error)


def text(checks: list[Check], markdown: bool) -> str:
    """The table: aligned for a terminal, or in Markdown."""
    rows = [["architecture", "position_ids only", "ours", "kernels", "verdict"]]
    for result in checks:
        alone = f"error: {result.position_ids_error}"
        if result.position_ids_error is None:
            alone = "" if result.position_ids_only is None else f"{result.position_ids_only:.1e}"
        ours = "" if result.difference is None else f"{result.difference:.1e}"
        kernels = ", ".join(f"{operation}: {kernel}" for operation, kernel in result.kernels.items())
        verdict = result.verdict if result.reason is None else f"{result.verdict}: {result.reason}"
        rows.append([result.architecture, alone, ours, kernels, verdict])
    return table(rows, markdown) + "\n\n" + summary([result.verdict for result in checks], VERDICTS)


def main(args: argparse.Namespace, models: dict[str, Builder]) -> int:
    """Print the table of `models`. Returns the exit status."""
    checks = check(models)
    show(args, checks, text, documents=DOCUMENTS)
    named = args.path or args.architectures
    return int(bool(named) and any(result.verdict != "packs" for result in checks))
