"""Advantages and weights against loops over plain numbers, in fp64."""

import math
import statistics

import pytest
import torch

from posttrain.advantages import advantages, informative, overlong_penalty, token_weights
from posttrain.config.algorithm import AdvantageScale, Aggregation, AlgorithmConf, Baseline, OverlongConf

NAN = float("nan")
REWARDS = [
    [1.0, 0.0, 0.5, 0.25],
    [NAN, 0.0, 1.0, 0.0],
    [0.3, 0.3, 0.3, 0.3],  # equal
    [NAN, NAN, NAN, 2.0],  # one that could be scored
    [-1.0, 7.5, NAN, 2.0],
]
LENGTHS = [[1, 50, 7, 3], [9, 9, 2, 64], [5, 4, 3, 2], [8, 1, 1, 6], [10, 20, 30, 40]]
# By batch every completion is compared with all others, by group only with its own: the two do not mix (rules.py).
COMBINATIONS = [(b, s) for b in Baseline for s in AdvantageScale if (b, s) != (Baseline.batch, AdvantageScale.group)]


def found(rewards, lengths, baseline, scale):
    cfg = AlgorithmConf(advantage_baseline=baseline, advantage_scale=scale)
    return advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(lengths), cfg)


def looped(rewards, lengths, baseline, scale):
    """One completion at a time; NaN where there is no reward."""
    everyone = [reward for group in rewards for reward in group if not math.isnan(reward)]
    differences = []
    for group in rewards:
        scored = [reward for reward in group if not math.isnan(reward)]
        row = []
        for n, reward in enumerate(group):
            others = [r for m, r in enumerate(group) if m != n and not math.isnan(r)]
            if math.isnan(reward):
                row.append(NAN)
            elif baseline is Baseline.batch:
                row.append(reward - statistics.fmean(everyone))
            elif not others:
                row.append(0.0)
            elif baseline is Baseline.leave_one_out:  # verl's compute_rloo_outcome_advantage
                row.append(reward - statistics.fmean(others))
            else:  # verl's compute_grpo_outcome_advantage
                row.append(reward - statistics.fmean(scored))
        differences.append(row)
    if scale is AdvantageScale.none:
        return differences
    if scale is AdvantageScale.batch:
        return [[d / (statistics.stdev(everyone) + 1e-4) for d in row] for row in differences]
    if scale is AdvantageScale.group:
        deviations = [[r for r in group if not math.isnan(r)] for group in rewards]
        deviations = [statistics.stdev(scored) if len(scored) > 1 else 0.0 for scored in deviations]
        return [[d / (std + 1e-4) for d in row] for row, std in zip(differences, deviations, strict=True)]
    # verl's compute_reinforce_plus_plus_baseline_outcome_advantage: every token has its completion's value.
    tokens = [
        d
        for row, counts in zip(differences, lengths, strict=True)
        for d, count in zip(row, counts, strict=True)
        for _ in range(count)
        if not math.isnan(d)
    ]
    mean, variance = statistics.fmean(tokens), statistics.variance(tokens)
    return [[(d - mean) / math.sqrt(variance + 1e-8) for d in row] for row in differences]


@pytest.mark.parametrize(("baseline", "scale"), COMBINATIONS)
@pytest.mark.parametrize("unit", [1.0, 1e-4])  # where rewards are small, what is added to deviations shows
def test_advantages_against_a_loop(baseline, scale, unit):
    rewards = [[unit * reward for reward in group] for group in REWARDS]
    wanted = torch.tensor(looped(rewards, LENGTHS, baseline, scale), dtype=torch.float64)
    torch.testing.assert_close(found(rewards, LENGTHS, baseline, scale), wanted, rtol=1e-9, atol=1e-12, equal_nan=True)


def test_plain_reinforce_pp_has_no_baseline():
    """Whitening takes the mean away: verl's compute_reinforce_plus_plus_outcome_advantage whitens raw rewards."""
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    tokens = rewards.flatten().repeat_interleave(torch.tensor(LENGTHS).flatten())
    tokens = tokens[~tokens.isnan()]
    wanted = (rewards - tokens.mean()) / (tokens.var() + 1e-8).sqrt()
    values = found(REWARDS, LENGTHS, Baseline.batch, AdvantageScale.batch_tokens)
    torch.testing.assert_close(values, wanted, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize(("baseline", "scale"), COMBINATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_teach_nothing(baseline, scale, dtype):
    # In fp32 the mean of seven 0.1 is not 0.1: (R - mean) / (std + 1e-8) would be 0.41.
    cfg = AlgorithmConf(advantage_baseline=baseline, advantage_scale=scale)
    values = advantages(torch.full((2, 7), 0.1, dtype=dtype), torch.arange(14).view(2, 7), cfg)
    assert values.dtype == dtype and values.tolist() == [[0.0] * 7] * 2


@pytest.mark.parametrize("baseline", [Baseline.group, Baseline.leave_one_out])
@pytest.mark.parametrize("scale", [AdvantageScale.group, AdvantageScale.batch, AdvantageScale.none])
def test_a_group_of_equal_rewards_is_exactly_zero_among_others(baseline, scale):
    values = found(REWARDS, LENGTHS, baseline, scale)
    assert values[2].tolist() == [0.0] * 4 and values[3, 3] == 0.0


@pytest.mark.parametrize(("baseline", "scale"), COMBINATIONS)
def test_without_a_reward_nothing_breaks(baseline, scale):
    assert found([[NAN, NAN]], [[1, 2]], baseline, scale).isnan().all()
    assert found([[NAN, 3.0]], [[1, 2]], baseline, scale)[0, 1] == 0.0
    assert found([[0.5, 0.5]], [[0, 0]], baseline, scale).tolist() == [[0.0, 0.0]]


def test_which_groups_are_informative():
    rewards = torch.tensor([*REWARDS, [NAN] * 4, [0.0, 1e-7, 0.0, 0.0], [0.0, 1e-5, NAN, NAN]])
    assert informative(rewards).tolist() == [True, True, False, False, True, False, False, True]


def test_the_overlong_penalty_of_dapo():
    """Equation 13: nothing up to 80 of 100, then linear, -1 from 100 on; verl's reward manager dapo.py."""
    lengths = torch.tensor([[0, 80, 81, 90, 100, 120]])
    cfg = OverlongConf(buffer=0.2)
    expected = [0.0, 0.0, -0.05, -0.5, -1.0, -1.0]
    assert overlong_penalty(lengths, 100, cfg).tolist()[0] == pytest.approx(expected)
    cfg = OverlongConf(buffer=0.2, factor=0.5)
    assert overlong_penalty(lengths, 100, cfg).tolist()[0] == pytest.approx([value / 2 for value in expected])
    assert overlong_penalty(lengths, 100, OverlongConf()).tolist() == [[0.0] * 6]


@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_aggregation_against_a_loop(aggregation):
    token_losses = [[0.3], [1.0, -2.0, 0.5], [0.1] * 50]
    lengths = list(map(len, token_losses))
    weights = token_weights(lengths, aggregation, max_new_tokens=64)
    total = sum(w * loss for w, row in zip(weights, token_losses, strict=True) for loss in row)
    wanted = {
        Aggregation.token_mean: sum(map(sum, token_losses)) / sum(lengths),
        Aggregation.seq_mean_token_mean: sum(sum(row) / len(row) for row in token_losses) / 3,
        Aggregation.seq_mean_token_sum: sum(map(sum, token_losses)) / 3,
        Aggregation.seq_mean_token_sum_norm: sum(map(sum, token_losses)) / (3 * 64),
    }[aggregation]
    assert total == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_documents_that_do_not_count_weigh_nothing(aggregation):
    with_masked = token_weights([4, 0, 6], aggregation, 16)
    alone = token_weights([4, 6], aggregation, 16)
    assert with_masked == [alone[0], 0.0, alone[1]]
    assert token_weights([0, 0], aggregation, 16) == [0.0, 0.0]
