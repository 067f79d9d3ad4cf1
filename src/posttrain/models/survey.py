"""What the tables over all architectures have in common: their arguments, tiny models, progress and print."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import json
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from posttrain.errors import UserError
from posttrain.models.architectures import architectures, tiny
from posttrain.models.shrink import tiny_copy

Result = TypeVar("Result")
Builder = Callable[[], PreTrainedModel]


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", help="model types of transformers; all of them by default")
    parser.add_argument("--path", help="one checkpoint instead: a directory, or a name on the hub")
    parser.add_argument("--json", action="store_true", help="the whole result, for programs")
    parser.add_argument("--markdown", action="store_true", help="the table, for documents")
    return parser.parse_args()


def builders(args: argparse.Namespace) -> dict[str, Builder]:
    """What builds the tiny model of each architecture asked for. Errors: UserError for a name that does not exist."""
    known = architectures()
    for name in (name for name in args.architectures if name not in known):
        near = difflib.get_close_matches(name, known, 3)
        instead = f"Type: {' or '.join(near)}" if near else "Without a name the table has every architecture"
        raise UserError(f"transformers knows no causal language model {name!r}. {instead}")
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # for tiny tensors more are slower
    found = {args.path: checkpoint(args.path)} if args.path else {}
    names = args.architectures or ([] if args.path else known)
    return found | {name: functools.partial(tiny, name) for name in names}


def checkpoint(path: str) -> Builder:
    """Builds a tiny copy of the model at `path`, which is a directory or a name on the hub. Errors: UserError."""
    if path.startswith((".", "/", "~")) and not Path(path).is_dir():
        raise UserError(f"--path {path} is no directory. Give one that has a config.json, or a hub name.")
    try:
        config = AutoConfig.from_pretrained(path).get_text_config(decoder=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"--path {path}: {one_line(error)}. Give a directory or a hub name.") from error

    def build() -> PreTrainedModel:
        torch.manual_seed(0)
        if (small := tiny_copy(model, torch.device("cpu"), torch.float32)) is None:
            raise ValueError(f"no tiny model of the layer classes of {type(model).__name__}")
        return small.eval()

    return build


def progress(results: Sequence[Result], what: str) -> Iterator[Result]:
    """The results, which have an `architecture`, each announced on stderr."""
    for done, result in enumerate(results, 1):
        print(f"{what} {done}/{len(results)} {result.architecture}", file=sys.stderr, flush=True)
        yield result


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 200)}".rstrip(".: ")


def table(rows: list[list[str]], markdown: bool) -> str:
    """Rows, the first of them headings: aligned for a terminal, or in Markdown."""
    if markdown:
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        lines.insert(1, "|" + "---|" * len(rows[0]))
    else:
        rows = [[name, *(textwrap.shorten(cell, 48) for cell in cells), last] for name, *cells, last in rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(f"{cell:<{n}}" for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def show(args: argparse.Namespace, checks: Sequence, text: Callable[[Sequence, bool], str], **measured) -> None:
    """The results, which are dataclasses, as JSON with what was `measured`, or as the table that `text` makes."""
    if args.json:
        found = {"versions": versions(), **measured, "checks": [dataclasses.asdict(check) for check in checks]}
        print(json.dumps(found, indent=2))
    else:
        print(text(checks, args.markdown))


def summary(verdicts: Sequence[str], kinds: Sequence[str]) -> str:
    """How many of each kind of verdict, and with which versions."""
    counts = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in kinds)
    return f"{len(verdicts)} architectures: {counts} ({versions()})"


def versions() -> str:
    return f"transformers {transformers.__version__}, torch {torch.__version__}"
