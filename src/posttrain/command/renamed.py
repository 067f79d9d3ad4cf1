"""Names of version 0.1 that have changed: what is typed still works, with a line that says what to type from now on."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from posttrain.config.validation import RENAMED


def renamed(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command line with groups called by their new names. Says so on stderr."""
    found = {argument: _renamed(argument) for argument in arguments}
    changed = {old: new for old, new in found.items() if old != new}
    if changed:
        were, are = " ".join(changed), " ".join(changed.values())
        print(f"{were} is now {are}; the old name goes in version 0.2", file=sys.stderr)
    return [found[argument] for argument in arguments]


def _renamed(argument: str) -> str:
    """`group=option` and `group.key=value`, also after +, ++ or hydra.sweeper.params., and `~group` or `~group.key`."""
    old = re.fullmatch(r"(~|\+{0,2}(?:hydra\.sweeper\.params\.)?)(\w+)((?:[.@][\w.@]*)?)(=.*)?", argument, re.DOTALL)
    if old is None or old[2] not in RENAMED or (old[4] is None and old[1] != "~"):
        return argument
    return "".join([old[1], RENAMED[old[2]], *filter(None, old.groups()[2:])])
