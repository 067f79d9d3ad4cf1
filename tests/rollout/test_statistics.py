"""pass@k and maj@k against every subset of the samples; intervals against their definitions."""

import itertools
import math
import random
import statistics

import pytest

from posttrain.rollout.statistics import interval, is_stale, majority, pass_at_k, powers, wilson


@pytest.mark.parametrize("samples", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(samples):
    for right in range(samples + 1):
        outcomes = [True] * right + [False] * (samples - right)
        for k in range(1, samples + 1):
            subsets = list(itertools.combinations(outcomes, k))
            assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_no_k_beyond_the_samples():
    for k in (0, 4):
        with pytest.raises(ValueError, match="pass@"):
            pass_at_k(3, 1, k)


def test_which_k():
    assert [powers(n) for n in (1, 2, 3, 4, 6, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_the_majority():
    assert majority([7, 7, 3], [True, True, False]) == 1
    assert majority([7, 3, 3], [True, False, False]) == 0
    assert majority([7, 3, 3, 7], [True, False, False, True]) == 0.5
    assert majority(["a", "b", "c"], [False, True, False]) == pytest.approx(1 / 3)
    assert majority(["x"], [True]) == 1


def wilson_by_bisection(right, count):
    """The shares p of which `right` of `count` is 1.959964 standard deviations away: sqrt(p (1 - p) / count) each."""

    def edge(low, high):
        for _ in range(200):
            middle = (low + high) / 2
            away = abs(right / count - middle) > 1.959964 * math.sqrt(middle * (1 - middle) / count)
            low, high = (middle, high) if away else (low, middle)
        return low

    # From the far end towards the share.
    return edge(0.0, right / count), edge(1.0, right / count)


@pytest.mark.parametrize("right, count", [(0, 5), (5, 5), (3, 24), (100, 128), (1, 1)])
def test_the_interval_of_a_share(right, count):
    assert wilson(right, count) == pytest.approx(wilson_by_bisection(right, count), abs=1e-6)


def test_the_interval_of_a_mean_covers_it_19_times_in_20():
    draw, hits = random.Random(0), 0
    for _ in range(2000):
        low, high = interval([draw.gauss(3, 2) for _ in range(60)])
        hits += low < 3 < high
    assert hits / 2000 == pytest.approx(0.95, abs=0.015)
    assert all(map(math.isnan, interval([1.0]))) and statistics.fmean(interval([1.0, 2.0])) == 1.5


def test_patience():
    assert not is_stale([1, 2, 3], 2) and not is_stale([3, 2], 2) and not is_stale([3, 2, 1], 0)
    assert is_stale([3, 2, 1], 2) and is_stale([1, 3, 3, 3], 2) and not is_stale([3, 1, 4], 2)
