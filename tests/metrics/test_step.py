"""What a record says, against values by hand."""

import math
import statistics
from types import SimpleNamespace

import pytest
import torch

from posttrain.metrics import step as metrics


def test_metrics_are_of_trained_tokens_and_taken_steps(monkeypatch):
    """Padding, and a rank or a micro-batch without a token, are in no mean and no extreme."""
    monkeypatch.setattr(metrics, "reduce_over_ranks", lambda values, op: {k: v.item() for k, v in values.items()})
    found = metrics.UpdateMetrics(complete=True, always=True)

    def add(weights, gap, loss):
        weights_BK, values = torch.tensor([weights]), torch.zeros(1, len(weights))
        row = SimpleNamespace(weights_BK=weights_BK, sampled_logprobs_BK=values)
        means = {"entropy": values + 2 * loss, "clip_ratio/low_mean": values, "clip_ratio/high_mean": values + 0.5}
        terms = dict(loss_BK=values + loss, policy_BK=values + loss, old_logprobs_BK=values + gap, means=means)
        found.add(row, SimpleNamespace(**terms))

    add([0.5, 0.5, 0.0], 1.0, 1.0)
    add([0.0, 0.0], -9.0, float("nan"))  # all masked
    found.end(3.0)
    add([0.25], 2.0, 4.0)
    found.end(5.0)
    add([1.0], 50.0, float("nan"))
    found.end(None)
    found = found.over_ranks(sampler_known=True)
    e = math.e
    assert found == pytest.approx(
        {
            "loss": (1.0 + 1.0) / 2, "policy_loss": (1.0 + 1.0) / 2, "grad_norm": 4.0, "skipped_updates": 1,
            "entropy": (2 * 2.0 + 8.0) / 3, "clip_ratio/low_mean": 0.0, "clip_ratio/high_mean": 0.5,
            "clip_ratio/region_mean": 0.5, "sampling/logp_difference/mean": (1 + 1 + 2) / 3,
            "sampling/logp_difference/max": 2.0, "sampling/importance_sampling_ratio/mean": (2 * e + e**2) / 3,
            "sampling/importance_sampling_ratio/min": e, "sampling/importance_sampling_ratio/max": e**2,
            "sampling/kl": (2 * (e - 2) + e**2 - 3) / 3,
        }, rel=1e-5,
    )  # fmt: skip


def test_metrics_of_rewards_leave_out_what_could_not_be_scored():
    nan = float("nan")
    rewards = [[1.0, 0.0, nan], [nan, nan, 0.5], [0.25, 0.25, 0.25]]
    scores = [{"total": r, "correct": r, "format": 1.0} for row in rewards for r in row]
    found = metrics.reward_metrics(torch.tensor(rewards), scores)
    known = [1.0, 0.0, 0.5, 0.25, 0.25, 0.25]
    assert found == pytest.approx(
        {
            "reward": sum(known) / 6,
            "reward_std": (0.5**0.5 + 0.0) / 2,  # of the groups that have one
            "frac_reward_zero_std": 1 / 3,
            "frac_reward_unscorable": 3 / 9,
            "rewards/correct/mean": sum(known) / 6,
            "rewards/correct/std": statistics.stdev(known),
            "rewards/format/mean": 1.0,
            "rewards/format/std": 0.0,
        }
    )
