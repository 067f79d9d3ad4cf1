"""Losses against loops that follow the papers' equations one token at a time, in fp64."""

import math
import statistics

import pytest
import torch

from posttrain import losses
from posttrain.config import AdvantageScale, Aggregation, LossConf

NAN = float("nan")


def test_group_advantages_against_a_loop():
    rewards = [[1.0, 0.0, 0.5, 0.25], [0.0, 0.0, 1.0, 0.0]]
    found = losses.advantages(torch.tensor(rewards, dtype=torch.float64), AdvantageScale.group)
    for group, row in zip(rewards, found.tolist(), strict=True):
        mean, std = statistics.mean(group), statistics.stdev(group)  # with Bessel's correction
        assert row == pytest.approx([(reward - mean) / (std + 1e-4) for reward in group], rel=1e-12)


def test_dr_grpo_does_not_divide():
    found = losses.advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), AdvantageScale.none)
    assert found.tolist() == [[0.75, -0.25, -0.25, -0.25]]


@pytest.mark.parametrize("scale", list(AdvantageScale))
def test_equal_rewards_teach_nothing(scale):
    # In fp32 the mean of seven 0.1 is not 0.1: (R - mean) / (std + 1e-8) would be 0.41.
    assert losses.advantages(torch.full((1, 7), 0.1), scale).tolist() == [[0.0] * 7]


def test_unscorable_rewards_are_left_out():
    found = losses.advantages(torch.tensor([[1.0, NAN, 0.0, NAN], [NAN, NAN, NAN, 1.0]]), AdvantageScale.group)
    alone = losses.advantages(torch.tensor([[1.0, 0.0]]), AdvantageScale.group)
    assert found[0, [0, 2]].tolist() == alone[0].tolist()
    assert found.isnan().tolist() == [[False, True, False, True], [True, True, True, False]]
    assert found[1, 3] == 0.0


@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_aggregation_against_a_loop(aggregation):
    token_losses = [[0.3], [1.0, -2.0, 0.5], [0.1] * 50]
    lengths = list(map(len, token_losses))
    weights = losses.token_weights(lengths, aggregation, max_new_tokens=64)
    found = sum(w * loss for w, row in zip(weights, token_losses, strict=True) for loss in row)
    wanted = {
        Aggregation.token_mean: sum(map(sum, token_losses)) / sum(lengths),
        Aggregation.seq_mean_token_mean: sum(sum(row) / len(row) for row in token_losses) / 3,
        Aggregation.seq_mean_token_sum: sum(map(sum, token_losses)) / 3,
        Aggregation.seq_mean_token_sum_norm: sum(map(sum, token_losses)) / (3 * 64),
    }[aggregation]
    assert found == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_documents_that_do_not_count_weigh_nothing(aggregation):
    with_masked = losses.token_weights([4, 0, 6], aggregation, 16)
    alone = losses.token_weights([4, 6], aggregation, 16)
    assert with_masked == [alone[0], 0.0, alone[1]]
    assert losses.token_weights([0, 0], aggregation, 16) == [0.0, 0.0]


def test_clipped_surrogate_and_its_gradient_against_a_loop():
    torch.manual_seed(0)
    cfg = LossConf(clip_low=0.2, clip_high=0.28)
    old = torch.randn(200, dtype=torch.float64)
    new = (old + 0.4 * torch.randn(200, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(200, dtype=torch.float64)
    found, _, _ = losses.clipped_surrogate(new, old, advantages, cfg)
    found.sum().backward()
    for k in range(200):
        ratio, advantage = math.exp(new[k].item() - old[k].item()), advantages[k].item()
        clipped = min(max(ratio, 0.8), 1.28)
        assert found[k].item() == pytest.approx(-min(ratio * advantage, clipped * advantage), rel=1e-12)
        acts = ratio * advantage > clipped * advantage  # the clipped branch is constant in the ratio
        assert new.grad[k].item() == pytest.approx(0.0 if acts else -ratio * advantage, rel=1e-9, abs=1e-12)


def test_clip_fraction_counts_only_where_the_clip_acts():
    ratio = torch.tensor([0.5, 0.5, 1.5, 1.5])
    _, low, high = losses.clipped_surrogate(ratio.log(), torch.zeros(4), torch.tensor([-1.0, 1, -1, 1]), LossConf())
    assert low.tolist() == [True, False, False, False]
    assert high.tolist() == [False, False, False, True]


def test_a_huge_ratio_stays_finite():
    new, old, advantage = torch.tensor([500.0]), torch.tensor([-500.0]), torch.tensor([-1.0])
    found, _, _ = losses.clipped_surrogate(new, old, advantage, LossConf())
    assert found.isfinite().all()
