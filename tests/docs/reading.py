"""What README, CONTRIBUTING and docs/ say, for the tests beside this file."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from conftest import ROOT

DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = {"python", "make", "pip", "source", "jupyter", "jupyter-execute", "git", "torchrun", "accelerate", "srun"}
NEEDS = re.compile(r"\b(GPUs?|hub|package index|minutes?|hour)\b")  # why a command is checked and not run


@dataclass
class Command:
    doc: str
    words: list[str]
    needs: str | None

    def __str__(self) -> str:
        return f"{self.doc}: {' '.join(self.words)}"


def parts(doc: Path) -> list[tuple[str, str, str]]:
    """(info string, text, the last line of prose before it) of each fenced block, and ("", prose, "") between them."""
    found, lead = [], ""
    for number, part in enumerate(re.split(r"^```", doc.read_text(), flags=re.MULTILINE)):
        if number % 2:
            info, _, text = part.partition("\n")
            found.append((info or "shell", text, lead))
        else:
            found.append(("", part, ""))
            lead = (part.strip().splitlines() or [lead])[-1]
    return found


def in_blocks() -> list[Command]:
    """The commands of fenced blocks without a language."""
    found = []
    for doc in DOCS:
        for info, text, lead in parts(doc):
            for line in text.splitlines() if info == "shell" else []:
                words = shlex.split(line, comments=True)
                if words and words[0] in PROGRAMS:
                    comment = line.partition(" #")[2]
                    reason = NEEDS.search(comment) or NEEDS.search(lead)
                    found.append(Command(doc.name, words, reason and reason[0]))
    return found


def in_prose() -> list[Command]:
    """The commands between backticks."""
    found = []
    for doc in DOCS:
        for token in tokens(doc):
            words = [word for word in token.split() if not re.match(r"[A-Z]+=", word)]
            if words and words[0] in PROGRAMS and len(words) > 1:
                found.append(Command(doc.name, words, "prose"))
    return found


def tokens(doc: Path) -> list[str]:
    """What stands between backticks, outside fenced blocks, line breaks as spaces."""
    prose = "\n\n".join(text for info, text, _ in parts(doc) if not info)
    return [" ".join(token.split()) for token in re.findall(r"`([^`]+)`", prose)]


def metric_names() -> list[str]:
    """The first column of the tables of metrics."""
    found = []
    for name in ("algorithms.md", "mfu.md", "evaluation.md"):
        for table in re.findall(r"^\| (?:of|name)[^\n]*\n\|---\|---\|\n((?:\|[^\n]*\n)+)", _text(name), re.MULTILINE):
            for row in table.splitlines():
                found += re.findall(r"`([^`]+)`", row.split("|")[1])
    return found


def metric_pattern(names: list[str]) -> re.Pattern:
    """Of one name as a record has it: `<phase>` is any, and `trained/` may stand before it."""
    each = (re.sub(r"<\w+>", r"[\\w-]+", re.escape(name)) for name in names)
    return re.compile(rf"(trained/)?({'|'.join(each)})")


def _text(name: str) -> str:
    return (ROOT / "docs" / name).read_text()
