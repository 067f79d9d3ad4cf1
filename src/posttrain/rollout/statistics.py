"""What several samples of each held-out problem say: pass@k, maj@k, and how sure it is. Pure functions.

Suffixes: P problems, S samples of each.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Sequence

Z = 1.959964  # of the normal distribution: 95 % lie within


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The chance that one of k samples is right, without bias: 1 - C(n - c, k) / C(n, k) (arXiv:2107.03374, eq. 1).

    Raises ValueError for k beyond the samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def powers(samples: int) -> list[int]:
    """1, 2, 4, ... up to `samples`, and `samples` itself."""
    doubled = [2**n for n in range(samples.bit_length())]
    return doubled if doubled[-1] == samples else [*doubled, samples]


def majority(answers_S: Sequence[Hashable], right_S: Sequence[bool]) -> float:
    """Is the answer that most samples give right? Between answers that are as frequent a coin decides: its mean."""
    count: dict[Hashable, int] = {}
    for answer in answers_S:
        count[answer] = count.get(answer, 0) + 1
    most = max(count.values())
    winners = [answer for answer, times in count.items() if times == most]
    rights = {answer for answer, right in zip(answers_S, right_S, strict=True) if right}
    return sum(winner in rights for winner in winners) / len(winners)


def wilson(right: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson, 1927): inside [0, 1], and not empty where all or none are right."""
    share, z2 = right / count, Z * Z
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def interval(means_P: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of a mean over problems, each with its own mean: the samples of one problem are alike.

    (NaN, NaN) for fewer than two problems.
    """
    if len(means_P) < 2:
        return math.nan, math.nan
    mean, half = statistics.fmean(means_P), Z * statistics.stdev(means_P) / math.sqrt(len(means_P))
    return mean - half, mean + half


def is_stale(values: Sequence[float], patience: int) -> bool:
    """Are the last `patience` values no better than the best before them? Never with a patience of 0."""
    return 0 < patience < len(values) and max(values[-patience:]) <= max(values[:-patience])
