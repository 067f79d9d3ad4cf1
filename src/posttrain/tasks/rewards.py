"""Rewards: pure functions of a completion's text. Each returns a number in [0, 1], or None where it cannot score.

A reward is `(completion: str, answer: str, finished: bool) -> float | None`; `finished` says that the model ended
its turn by itself. None leaves the completion out of its group's statistics and out of the loss; it is not 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from posttrain.tasks import numbers
from posttrain.tasks.math_judge import JUDGE

Reward = Callable[[str, str, bool], float | None]


def exact(completion: str, answer: str, finished: bool) -> float:
    """1 if the completion, stripped of surrounding space, is the answer."""
    return float(finished and completion.strip() == answer.strip())


def numeric(completion: str, answer: str, finished: bool) -> float | None:
    """1 if the completion's final number equals the answer's, exactly. None if the answer ends with no plain number."""
    target = numbers.final(answer)
    if target is None:
        return None
    found = numbers.final(completion)
    return float(found is not None and numbers.equal(found, target))


def math(completion: str, answer: str, finished: bool) -> float | None:
    """As `numeric` for an answer that is a plain number; any other is compared as mathematics (math-verify).

    None if the answer cannot be read as mathematics.
    """
    written, said = _final_text(answer), _final_text(completion)
    target, found = numbers.plain(written), numbers.plain(said)
    if target is not None and found is not None:
        return float(numbers.equal(found, target))
    if target is not None and numeric(completion, answer, finished):
        return 1.0
    if target is None and not JUDGE.readable(written):
        return None
    return float(JUDGE.equal(said, written))


def _final_text(text: str) -> str:
    """The answer's part of a solution: after the last ####, in the last \\boxed{}, or the last line."""
    if "####" in text:
        return text.rpartition("####")[2].strip()
    if (boxed := numbers.in_box(text)) is not None:
        return boxed
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return (
        re.sub(r"^.*\b(?:answer|result) (?:is|:)\s*", "", lines[-1], flags=re.IGNORECASE).strip().rstrip(".")
        if lines
        else ""
    )


def integer_format(completion: str, answer: str, finished: bool) -> float:
    """1 if the completion is one integer and the turn was ended."""
    return float(finished and re.fullmatch(r"\s*-?\d+\s*", completion) is not None)


def marked_format(completion: str, answer: str, finished: bool) -> float:
    """1 if the turn was ended and its last line is `#### <number>`, gsm8k's answer marker."""
    last = completion.strip().rpartition("\n")[2].strip()
    return float(finished and last.startswith("####") and numbers.plain(last.removeprefix("####")) is not None)


def finished_format(completion: str, answer: str, finished: bool) -> float:
    """1 if the model ended its turn within the budget."""
    return float(finished)
