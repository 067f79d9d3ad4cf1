"""Every reward by name, made from its options; and those of a user's own file."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from posttrain.config.reward import RewardConf
from posttrain.errors import UserError
from posttrain.rewards import structure, text
from posttrain.rewards.calling import Function

PYTHON = "python:"


@dataclass(frozen=True, slots=True)
class Kind:
    """How a reward is made, and where it may run."""

    make: Callable[[RewardConf], Function]
    contained: bool = False  # it may take long, or for ever: it runs in a process of its own


def _plain(function: Function) -> Kind:
    return Kind(lambda cfg: function)


KINDS: dict[str, Kind] = {
    "exact": _plain(text.exact),
    "numeric": _plain(text.numeric),
    "math": Kind(lambda cfg: text.math, contained=True),
    "boxed": _plain(text.boxed_format),
    "integer_format": _plain(text.integer_format),
    "marked_format": _plain(text.marked_format),
    "finished": _plain(text.finished_format),
    "length": _plain(text.length),
    "repetition": Kind(lambda cfg: text.repetition(cfg.ngram)),
    "regex": Kind(structure.regex, contained=True),
    "json_schema": Kind(structure.json_schema, contained=True),
}


def make(source: str, cfg: RewardConf) -> Function:
    """The function that `source` names: a key of KINDS, or python:<file>:<function>.

    Raises UserError for an option that it lacks, and a file that cannot be used.
    """
    return load(source.removeprefix(PYTHON)) if source.startswith(PYTHON) else KINDS[source].make(cfg)


def is_contained(source: str) -> bool:
    return source.startswith(PYTHON) or KINDS[source].contained


def load(place: str) -> Function:
    """The function of `path/to/file.py:function`. Raises UserError: no such file, an error in it, no such function."""
    file, name = split(place)
    spec = importlib.util.spec_from_file_location(f"reward_{Path(file).stem}", file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise UserError(f"reward.python={place}: there is no Python file {file}")
    module = importlib.util.module_from_spec(spec)
    # What stands beside it can be imported by it, as if it had been started as a program.
    sys.path.insert(0, str(Path(file).resolve().parent))
    # Dataclasses and pickle look for it there.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        # The user's code may raise anything, SystemExit too.
        raise UserError(f"reward.python={place}: the file raises {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(
            f"reward.python={place}: {file} has no function {name}; it has {', '.join(functions) or 'none'}"
        )
    return function


def split(place: str) -> tuple[str, str]:
    """File and function of `path/to/file.py:function`. Raises UserError where one is missing."""
    file, colon, name = place.rpartition(":")
    if not colon or not name.isidentifier() or not file.endswith(".py"):
        raise UserError(f"reward.python={place}: type reward.python=path/to/file.py:function")
    return file, name
