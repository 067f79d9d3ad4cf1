"""What the tables over all architectures have in common: progress, a table in two styles, JSON, the line at the end."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import torch
import transformers


class OfArchitecture(Protocol):
    """What a table has a row of: a dataclass that says which architecture it is about."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    architecture: str


Result = TypeVar("Result", bound=OfArchitecture)


def progress(results: Sequence[Result], what: str) -> Iterator[Result]:
    """The results, each announced on stderr."""
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


def show(
    args: argparse.Namespace, checks: list[Result], text: Callable[[list[Result], bool], str], **measured: Any
) -> None:
    """The results as JSON with what was `measured`, or as the table that `text` makes."""
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
