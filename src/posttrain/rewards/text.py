"""Rewards that are pure functions of a completion's text. Each returns a number, or None where it cannot score.

Most are `(completion: str, answer: str, finished: bool) -> float | None`, from 0 to 1; `finished` says that the model
ended its turn by itself. None leaves the completion out of its group's statistics and out of the loss; it is not 0.
Penalties are from -1 to 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from posttrain.rewards import numbers
from posttrain.rewards.math_judge import JUDGE

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
    """As `numeric` where both are plain numbers; anything else is compared as mathematics (math-verify).

    None if the answer cannot be read as mathematics.

    Raises:
        UserError: math-verify is needed and does not start.
    """
    written, said = final_text(answer), final_text(completion)
    target = numbers.plain(written)
    found = numbers.plain(said) or (numbers.final(completion) if target is not None else None)
    if target is not None and found is not None:
        return float(numbers.equal(found, target))
    if target is None and not JUDGE.readable(written):
        return None
    return float(JUDGE.equal(said, written))


def final_text(text: str) -> str:
    """The answer's part of a solution: after the last ####, in the last \\boxed{}, or the last line of mathematics."""
    text = text[-numbers.LONGEST :]
    if "####" in text:
        return text.rpartition("####")[2].strip()
    if (boxed := numbers.in_box(text)) is not None:
        return boxed.strip()
    # A displayed formula is one line.
    text = re.sub(r"\\\[([^\[\]]{0,1000})\\\]|\$\$([^$]{0,1000})\$\$", _on_one_line, text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    formulas = [line for line in lines if re.search(r"[\d$\\=√π^]", line)]
    last = (formulas or lines or [""])[-1]
    # A solution's "The answer is" leads to its answer.
    return (
        re.split(r"\b(?:answer|result)\W{0,4}(?:is\b|:)[\s:*]*", last, flags=re.IGNORECASE)[-1]
        .lstrip(" *")
        .rstrip(" .*")
    )


def _on_one_line(found: re.Match[str]) -> str:
    return f"$${' '.join((found[1] or found[2] or '').split())}$$"


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


def boxed_format(completion: str, finished: bool) -> float:
    """1 if the turn was ended and has an answer in \\boxed{}."""
    return float(finished and bool((numbers.in_box(completion[-numbers.LONGEST :]) or "").strip()))


def length(completions: list[str], completions_ids: list[list[int]]) -> list[float]:
    """Of a group, from 0 for its shortest completion to -1 for its longest, in tokens; 0 where all are as long.

    The part of Kimi k1.5's length reward (arXiv:2501.12599, section 2.3.3) that does not depend on the answer, moved
    from [-0.5, 0.5] to [-1, 0]: advantages do not see the shift.
    """
    lengths = [len(ids) for ids in completions_ids]
    shortest, room = min(lengths), max(lengths) - min(lengths)
    return [(shortest - each) / room if room else 0.0 for each in lengths]


def repetition(ngram: int) -> Callable[[str], float]:
    """From 0, where no run of `ngram` words comes twice, down to -1: the share of runs that came before.

    The penalty of Yeo et al. (arXiv:2502.03373, appendix B), averaged over the completion.
    """

    def penalty(completion: str) -> float:
        words = completion.lower().split()
        runs = [tuple(words[n : n + ngram]) for n in range(len(words) - ngram + 1)]
        return len(set(runs)) / len(runs) - 1.0 if runs else 0.0

    return penalty
