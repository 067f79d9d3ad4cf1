"""The report of a preflight: a part after the other, each right, worth a look, or refused, and a verdict over all."""

from __future__ import annotations

import contextlib
import json
import textwrap
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from posttrain.errors import UserError
from posttrain.tracking.files import finite


class Verdict(IntEnum):
    """The exit status that it stands for."""

    right = 0  # the run will start, and nothing is worth a look
    look = 1  # the run will start, and something is worth a look before it is paid for
    refused = 2  # the run would be refused, or could not end


@dataclass(slots=True)
class Part:
    """One thing that was looked at."""

    name: str
    lines: list[str] = field(default_factory=list)  # what was found
    warnings: list[str] = field(default_factory=list)  # what is worth a look
    refusals: list[str] = field(default_factory=list)  # why the run would be refused, and what to type instead
    facts: dict[str, Any] = field(default_factory=dict)  # the same in numbers, for programs
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        return Verdict.refused if self.refusals else Verdict.look if self.warnings else Verdict.right


class Report:
    """Prints each part as it ends, unless `as_json`, and keeps them all."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self.parts: list[Part] = []

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[Part]:
        """What is found inside. A UserError is a refusal, and ends the part; the parts after it go on."""
        part, began = Part(name), time.perf_counter()
        try:
            yield part
        except UserError as error:
            part.refusals.append(str(error))
        part.seconds = time.perf_counter() - began
        self.parts.append(part)
        if not self.as_json:
            print(text(part), flush=True)

    @property
    def verdict(self) -> Verdict:
        return max((part.verdict for part in self.parts), default=Verdict.right)

    def close(self, path: Path) -> Verdict:
        """Write everything to the JSON file `path`, and print it, or the verdict in words."""
        found = {
            "verdict": self.verdict.name,
            "exit_status": int(self.verdict),
            "parts": [asdict(part) | {"verdict": part.verdict.name} for part in self.parts],
        }
        written = json.dumps(finite(found), indent=2, allow_nan=False, default=str)
        path.write_text(written + "\n", encoding="utf-8")
        print(written if self.as_json else self._in_words())
        return self.verdict

    def _in_words(self) -> str:
        refused = [part.name for part in self.parts if part.verdict is Verdict.refused]
        looks = [part.name for part in self.parts if part.verdict is Verdict.look]
        words = "refused: " + ", ".join(refused) if refused else "the run will start"
        return words + (f"; worth a look: {', '.join(looks)}" if looks else "")


def text(part: Part) -> str:
    """A part for the terminal: its name in the margin, warnings and refusals marked."""
    marked = [
        *part.lines,
        *(f"LOOK     {warning}" for warning in part.warnings),
        *(f"REFUSED  {refusal}" for refusal in part.refusals),
    ]
    lines = [line for entry in marked for line in _wrapped(entry)] or [""]
    return "\n".join(f"{part.name if number == 0 else '':<12} {line}".rstrip() for number, line in enumerate(lines))


def _wrapped(entry: str) -> list[str]:
    return [piece for line in entry.split("\n") for piece in textwrap.wrap(line, 107, subsequent_indent="  ") or [""]]
