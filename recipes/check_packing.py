"""Which architectures can be packed, and what the field's usual call does to them.

python recipes/check_packing.py                                 # every causal language model of transformers
python recipes/check_packing.py qwen3_5 lfm2                    # these only
python recipes/check_packing.py --path Qwen/Qwen3.5-4B --json   # one checkpoint: its config and classes, no weights

On tiny models of the same layer classes and head widths, fp32 on the CPU: three documents in a row with nothing but
position_ids, and then with our boundaries, the kernels in use and the start-up probe. A figure is the largest
difference from each document alone, as a part of the largest value. Exit status 1 if a named one is refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import sys
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from posttrain.errors import UserError
from posttrain.models import gdn_packing
from posttrain.models.architectures import architectures, tiny
from posttrain.models.packed.probe import WAY_OUT
from posttrain.models.shrink import tiny_copy

DOCUMENTS = (13, 2, 17)


@dataclass(slots=True, kw_only=True)
class Check:
    """What was found about one architecture; a reason wherever there is no figure."""

    architecture: str
    position_ids_only: float | None = None
    position_ids_error: str | None = None
    difference: float | None = None
    layers: dict[str, int] = field(default_factory=dict)  # stateful and attention classes of the tiny model
    kernels: dict[str, str] = field(default_factory=dict)
    verdict: str = "packs"  # or refused, or not built
    reason: str | None = None


def position_ids_only(model: PreTrainedModel) -> float:
    """The leak of upstream's own functions: documents in a row, marked by position_ids, against each alone."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids_T = torch.randint(vocabulary, (sum(DOCUMENTS),), generator=torch.Generator().manual_seed(1))
    positions = [torch.arange(length) for length in DOCUMENTS]

    def logits(ids_T: torch.Tensor, position_ids_T: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids_T[None], position_ids=position_ids_T[None], use_cache=False).logits[0]

    with torch.no_grad():
        alone_TV = torch.cat([logits(*document) for document in zip(ids_T.split(DOCUMENTS), positions, strict=True)])
        packed_TV = logits(ids_T, torch.cat(positions))
    return float((packed_TV - alone_TV).abs().max() / alone_TV.abs().max())


def check(builders: dict[str, Callable[[], PreTrainedModel]]) -> list[Check]:
    """One result a builder. All the leaks first: `patch` holds for the process and all models that share a function."""
    checks = [Check(architecture=name) for name in builders]
    for result in _progress(checks, "position_ids only"):
        try:
            model = builders[result.architecture]()
        except Exception as error:  # of whatever kind: the reason is what the table shows
            result.verdict, result.reason = "not built", _one_line(error)
            continue
        try:
            result.position_ids_only = position_ids_only(model)
        except Exception as error:
            result.position_ids_error = _one_line(error)
    for result in _progress([result for result in checks if result.verdict != "not built"], "probe"):
        model = builders[result.architecture]()
        try:
            gdn_packing.patch(model)
            proof = gdn_packing.verify(model)
            result.difference, result.layers, result.kernels = proof.max_difference, proof.layers, proof.kernels
        except Exception as error:  # a UserError, or an architecture that cannot be called so
            result.verdict, result.reason = "refused", _one_line(error)
    return checks


def _progress(checks: list[Check], what: str):
    for done, result in enumerate(checks, 1):
        print(f"{what} {done}/{len(checks)} {result.architecture}", file=sys.stderr, flush=True)
        yield result


def _one_line(error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error).removeprefix("packing=thd is unsafe here: ").removesuffix(WAY_OUT).strip()
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 200)}".rstrip(".: ")


def checkpoint(path: str) -> Callable[[], PreTrainedModel]:
    """Builds a tiny copy of the model at `path`, which is a directory or a name on the hub. Errors: UserError."""
    try:
        config = AutoConfig.from_pretrained(path).get_text_config(decoder=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"--path {path}: {_one_line(error)}. Give a directory or a hub name.") from error

    def build() -> PreTrainedModel:
        torch.manual_seed(0)
        if (small := tiny_copy(model, torch.device("cpu"), torch.float32)) is None:
            raise ValueError(f"no tiny model of the layer classes of {type(model).__name__}")
        return small.eval()

    return build


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
    if markdown:
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        lines.insert(1, "|" + "---|" * len(rows[0]))
    else:
        widths = [min(max(map(len, column)), 48) for column in zip(*rows, strict=True)]
        lines = ["  ".join(f"{cell:<{n}}" for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]
    counts = [f"{sum(c.verdict == verdict for c in checks)} {verdict}" for verdict in ("packs", "refused", "not built")]
    summary = f"{len(checks)} architectures: {', '.join(counts)} ({versions()})"
    return "\n".join([*lines, "", summary])


def versions() -> str:
    return f"transformers {transformers.__version__}, torch {torch.__version__}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", help="model types of transformers; all of them by default")
    parser.add_argument("--path", help="one checkpoint instead: a directory, or a name on the hub")
    parser.add_argument("--json", action="store_true", help="the whole result, for programs")
    parser.add_argument("--markdown", action="store_true", help="the table, for documents")
    args = parser.parse_args()
    known = architectures()
    for name in (name for name in args.architectures if name not in known):
        near = difflib.get_close_matches(name, known, 3) or ["no name at all, for every architecture"]
        print(f"transformers knows no causal language model {name!r}. Type: {', '.join(near)}", file=sys.stderr)
        return 2
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # for tiny tensors more are slower
    try:
        builders = {args.path: checkpoint(args.path)} if args.path else {}
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    names = args.architectures or ([] if args.path else known)
    checks = check(builders | {name: lambda name=name: tiny(name) for name in names})
    if args.json:
        found = {"versions": versions(), "documents": DOCUMENTS, "checks": [dataclasses.asdict(c) for c in checks]}
        print(json.dumps(found, indent=2))
    else:
        print(text(checks, args.markdown))
    named = args.path or args.architectures
    return int(bool(named) and any(result.verdict != "packs" for result in checks))


if __name__ == "__main__":
    sys.exit(main())
