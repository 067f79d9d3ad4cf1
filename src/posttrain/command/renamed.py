"""Names of version 0.1 that have changed: what is typed still works, with a line that says what to type from now on."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Sequence

from posttrain.config.validation import RENAMED, RENAMED_KEYS
from posttrain.errors import UserError

_ARGUMENT = re.compile(
    r"(?P<how>~|\+{0,2}(?:hydra\.sweeper\.params\.)?)(?P<group>\w+)(?P<key>(?:[.@][\w.@]*)?)(?P<value>=.*)?", re.DOTALL
)


def renamed(arguments: Sequence[str], groups: Collection[str]) -> list[str]:
    """The arguments of a command line with groups called by their new names. Says so on stderr.

    `groups` are those of the recipe. Raises UserError where an option of a group is chosen by both names.
    """
    found = {argument: _renamed(argument, groups) for argument in arguments}
    changed = {old: new for old, new in found.items() if old != new}
    for old, new in changed.items():
        group = new.partition("=")[0]
        if group in groups and any(argument.startswith(f"{group}=") for argument in arguments):
            raise UserError(f"{old} is now {new}, and {group}= is given as well: leave one of them out")
    if changed:
        were, are = " ".join(changed), " ".join(changed.values())
        print(f"{were} is now {are}; the old name goes in version 0.2", file=sys.stderr)
    return [found[argument] for argument in arguments]


def _renamed(argument: str, groups: Collection[str]) -> str:
    """`group=option` and `group.key=value`, also after +, ++ or hydra.sweeper.params., and `~group` or `~group.key`."""
    old = _ARGUMENT.fullmatch(argument)
    if old is not None and (key := RENAMED_KEYS.get(old["group"] + old["key"])) is not None:
        return "".join([old["how"], key, old["value"] or ""])
    if old is None or RENAMED.get(old["group"]) not in groups or (old["value"] is None and old["how"] != "~"):
        return argument
    return "".join([old["how"], RENAMED[old["group"]], old["key"], old["value"] or ""])
