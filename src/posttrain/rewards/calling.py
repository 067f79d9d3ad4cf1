"""What a reward is told of a completion, how it is called, and what it may return.

A reward names what it wants to know as its parameters: the fields of `Sample`, or columns of the row by their names. A
function with a parameter `completions` is called once for a whole group: it gets `completions`, `completions_ids` and
`finished` as lists, and returns a list.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

Function = Callable[..., Any]
# What counts of a dict that a reward returns; its other entries are logged.
COUNTS = "score"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One completion of one problem."""

    prompt: Any  # text, or chat messages
    completion: str  # without special tokens
    answer: str | tuple[str, ...] | None  # several: any of them is right; None: the row has none
    finished: bool  # did the model end its turn by itself?
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]  # what the model wrote, with its end token
    task: str
    row: Mapping[str, Any]  # the other columns of the row


class Failure(NamedTuple):
    """Why there is no value."""

    reason: str  # one of REASONS
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


REASONS = ("exception", "value", "timeout", "died", "flood", "processes")
FIELDS = tuple(each.name for each in fields(Sample))
MANY = {"completions": "completion", "completions_ids": "completion_ids", "finished": "finished"}
Value = float | None | dict[str, float | None] | Failure


def call(function: Function, samples: Sequence[Sample], any_answer: bool = False) -> list[Value]:
    """The value of each sample of one group.

    Args:
        any_answer: of several answers the function gets one at a time, and the best value counts.
    """
    wanted, rest = _parameters(function)
    if "completions" in wanted:
        return _of_group(function, samples, wanted, rest)
    return [_of_sample(function, sample, wanted, rest, any_answer) for sample in samples]


def takes_groups(function: Function) -> bool:
    return "completions" in _parameters(function)[0]


def _parameters(function: Function) -> tuple[dict[str, bool], bool]:
    """The names that it takes and whether each must be given; whether it takes all that there are (**kwargs)."""
    signature = inspect.signature(function).parameters.values()
    named = {
        each.name: each.default is each.empty
        for each in signature
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    }
    return named, any(each.kind is each.VAR_KEYWORD for each in signature)


def _arguments(known: Mapping[str, Any], wanted: Mapping[str, bool], rest: bool) -> dict[str, Any]:
    """What is known under the names that are wanted. Raises LookupError for one that is needed and not known."""
    missing = [name for name, needed in wanted.items() if needed and name not in known]
    if missing:
        raise LookupError(f"there is no {missing[0]!r} to give it: there are {', '.join(known)}")
    return {name: value for name, value in known.items() if rest or name in wanted}


def _known(sample: Sample) -> dict[str, Any]:
    """The columns of the row, and the fields, which win."""
    return {**sample.row, **{name: getattr(sample, name) for name in FIELDS}}


def _of_sample(function: Function, sample: Sample, wanted: Mapping[str, bool], rest: bool, any_answer: bool) -> Value:
    try:
        known = _known(sample)
        several = sample.answer if isinstance(sample.answer, tuple) else (sample.answer,)
        if not any_answer or ("answer" not in wanted and not rest):
            return checked(function(**_arguments(known, wanted, rest)))
        if several == (None,):
            return None
        values = [checked(function(**_arguments(known | {"answer": each}, wanted, rest))) for each in several]
        numbers = [value for value in values if isinstance(value, float)]
        return max(numbers, default=next((value for value in values if isinstance(value, Failure)), None))
    except Exception as error:
        # It is code of the user's own, which may raise anything.
        return Failure("exception", f"{type(error).__name__}: {error}")


def _of_group(function: Function, samples: Sequence[Sample], wanted: Mapping[str, bool], rest: bool) -> list[Value]:
    known = {name: value for name, value in _known(samples[0]).items() if name not in ("completion", "completion_ids")}
    known |= {name: [getattr(sample, field) for sample in samples] for name, field in MANY.items()}
    try:
        values = function(**_arguments(known, wanted, rest))
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(samples):
            size = f"{len(values)} values" if isinstance(values, list | tuple) else f"a {type(values).__name__}"
            return [Failure("value", f"it returned {size} for {len(samples)} completions")] * len(samples)
        return [checked(value) for value in values]
    except Exception as error:
        return [Failure("exception", f"{type(error).__name__}: {error}")] * len(samples)


def checked(value: Any) -> Value:
    """As a number, None or a dict of these with an entry `score`; a Failure for anything else."""
    if isinstance(value, Mapping):
        if COUNTS not in value:
            return Failure("value", f"the dict that it returned has no {COUNTS!r}, but {', '.join(map(str, value))}")
        each = {str(name): _number(part) for name, part in value.items()}
        wrong = next((part for part in each.values() if isinstance(part, Failure)), None)
        return wrong or {name: part for name, part in each.items() if not isinstance(part, Failure)}
    return _number(value)


def _number(value: Any) -> float | None | Failure:
    if hasattr(value, "item") and getattr(value, "size", 1) in (1, ()):
        # Of numpy or torch.
        value = value.item()
    if value is None:
        return None
    if isinstance(value, bool | int | float):
        return float(value) if math.isfinite(value) else Failure("value", f"it returned {value}")
    return Failure("value", f"it returned {str(value)[:40]!r}, a {type(value).__name__}, and not a number")
