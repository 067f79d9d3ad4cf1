"""Rewards: pure functions of a completion's text. Each returns a number in [0, 1], or None where it cannot score.

A reward is `(completion: str, answer: str, finished: bool) -> float | None`; `finished` says that the model ended
its turn by itself. None leaves the completion out of its group's statistics and out of the loss; it is not 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation

Reward = Callable[[str, str, bool], float | None]

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?|[-+]?\.\d+")


def exact(completion: str, answer: str, finished: bool) -> float:
    """1 if the completion, stripped of surrounding space, is the answer."""
    return float(finished and completion.strip() == answer.strip())


def last_number(text: str) -> Decimal | None:
    """The number after the last `####` (gsm8k's marker) if there is one, else the last number of the text."""
    found = _NUMBER.findall(text.rsplit("####", 1)[-1]) if "####" in text else _NUMBER.findall(text)
    try:
        return Decimal((found[0] if "####" in text else found[-1]).replace(",", "")) if found else None
    except InvalidOperation:
        return None


def numeric(completion: str, answer: str, finished: bool) -> float | None:
    """1 if the completion's final number equals the answer's. None if the answer itself holds no number."""
    target = last_number(answer)
    return None if target is None else float(last_number(completion) == target)


def integer_format(completion: str, answer: str, finished: bool) -> float:
    """1 if the completion is one integer and the turn was ended."""
    return float(finished and re.fullmatch(r"\s*-?\d+\s*", completion) is not None)


def marked_format(completion: str, answer: str, finished: bool) -> float:
    """1 if the turn was ended and its last line is `#### <number>`, gsm8k's answer marker."""
    lines = completion.strip().splitlines()
    return float(finished and bool(lines) and re.fullmatch(r"####\s*[-+]?[\d,]*\.?\d+", lines[-1].strip()) is not None)


def finished_format(completion: str, answer: str, finished: bool) -> float:
    """1 if the model ended its turn within the budget."""
    return float(finished)
