"""What the command line says to its user: `--help`, and Hydra's errors in our words."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
import traceback
from pathlib import Path

import yaml
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from posttrain.config import RECIPES
from posttrain.config.meanings import rows
from posttrain.config.task import TASKS
from posttrain.config.validation import RENAMED, did_you_mean, every_key, no_such_key, plain
from posttrain.errors import UserError


def help_text(recipe: str, conf: Path) -> str:
    """The comment at the head of conf/<recipe>.yaml, its groups with the default first, its keys and their meanings.

    Hydra's own --help takes a second and a half: it copies its whole store four times a group.
    """
    lines = (conf / f"{recipe}.yaml").read_text().splitlines()
    head = [line.removeprefix("#")[1:] for line in itertools.takewhile(lambda line: line.startswith("#"), lines)]
    defaults = [entry for entry in yaml.safe_load("\n".join(lines))["defaults"] if isinstance(entry, dict)]
    groups = {}
    for entry in defaults:
        for group, default in entry.items():
            options = sorted(file.stem for file in (conf / group).glob("*.yaml"))
            if options:
                groups[group] = ", ".join(sorted(options, key=lambda option: option != default))
    order = {group: number for number, group in enumerate(["", *groups])}
    keys = sorted(_keys(recipe), key=lambda row: order.get(row[0].rpartition(".")[0].partition(".")[0], len(order)))
    return "\n".join(
        [
            *head,
            "\ngroup=option, the default first (experiment and sweep: none)",
            *(f"  {group:<12}{options}" for group, options in groups.items()),
            "\nkey=value, its default and meaning; an option may bring another default",
            *(f"  {key:<34}{default:<20}{meaning}" for key, default, meaning in keys),
            "\n--cfg job  shows every value           -m           runs all combinations of a,b values",
            "--info     shows where they come from   --hydra-help the rest",
        ]
    )


def _keys(recipe: str) -> list[tuple[str, str, str]]:
    """Key, default and meaning of all values, and of the values that only some tasks have."""
    found = rows(RECIPES[recipe])
    # Tasks share options: each line names all that have it.
    tasks: dict[tuple[str, str, str], list[str]] = {}
    for name, schema in TASKS.items():
        for row in rows(schema, "task."):
            tasks.setdefault(row, []).append(name)
    for (key, default, meaning), names in tasks.items():
        if (key, default, meaning) not in found:
            found.append((key, default, f"{meaning} (task={', '.join(names)})"))
    return found


def complain(error: Exception, recipe: str, debug: bool) -> int:
    """Say on stderr in a line or two what is wrong; the exit status. A traceback if debug or for a bug."""
    mistake = isinstance(error, UserError | HydraException | OmegaConfBaseException | ValueError | yaml.YAMLError)
    if mistake and not debug:
        print(_explain(error, recipe), file=sys.stderr)
    elif isinstance(error, OSError) and not debug:
        print(": ".join(filter(None, [error.strerror, error.filename])), file=sys.stderr)
    else:
        traceback.print_exception(error)
    return 2 if mistake else 1


def _explain(error: Exception, recipe: str) -> str:
    """What exists is listed, and `+key` never advised: it opens a hole that validation.typed closes."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OverrideParseException):
        reason = next(line for line in str(error).splitlines() if not line.startswith("Error parsing"))
        return f"{error.override}: {reason}. Type key=value, special characters in quotes: 'key=\"value\"'"
    chain, cause = [str(error)], error.__cause__
    while cause is not None:
        chain.append(str(cause))
        cause = cause.__cause__
    text = "\n".join(chain)
    file = found[0] + ": " if (found := re.match(r"In '[^']+'", text)) else ""
    if found := re.search(r"Could not find '(.+)/(.+?)'\n\nAvailable options in .*:\n((?:\t.*\n)+)", text):
        group, option, options = found[1], found[2], found[3].split()
        return f"{group}={option}: no option{did_you_mean(option, options)} There are: {', '.join(options)}"
    known_groups = [each.name for each in dataclasses.fields(RECIPES[recipe])]
    found = re.search(r"Could not (?:override|find) '/?(\w+)[/@']", text)
    if found and (new := RENAMED.get(found[1], found[1])) in RENAMED.values() and new not in known_groups:
        return f"{file}recipes/{recipe}.py has no group {found[1]}. There are: {', '.join(known_groups)}"
    if found and found[1] in RENAMED:
        new = RENAMED[found[1]]
        return f"{file}the group {found[1]} is now {new}: type {new}=..., in a defaults list `override /{new}: ...`"
    found = re.search(r"Key '.+' not in '(\w+)'\n\s+full_key: (\S+)", text)
    if found and not found[2].startswith("hydra."):
        known = every_key(recipe)
        for task in TASKS.values():
            if task.__name__ == found[1]:
                known["task"] = plain(OmegaConf.structured(task))
        return file + no_such_key(found[2], known)
    if (found := re.search(r"full_key: (\S+)", text)) and "is not a subclass of" in text:
        known = every_key(recipe)
        for part in found[1].split("."):
            known = known[part]
        return f"{file}{found[1]} is a group: type {found[1]}.{next(iter(known))}=...; it has {', '.join(known)}"
    noise = ("full_key:", "reference_type=", "object_type=", "To append")
    lines = [line.strip() for line in text.splitlines() if line and not line.strip().startswith(noise)]
    message = ": ".join(line.rstrip(":.") for line in lines).removeprefix("Error merging override ")
    key = re.search(r"full_key: (\S+)", text)
    return message if key is None or key[1] in message else f"{key[1]}: {message}"
