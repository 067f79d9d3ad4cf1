"""What a record says, against values by hand."""

import math
import statistics
from types import SimpleNamespace

import pytest
import torch

from posttrain.metrics import step as metrics
from posttrain.records import Group, Problem


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
    problem = Problem(task="arithmetic", index=0, prompt="", prompt_ids=(), answer="")
    groups = [
        Group(problem=problem, scores={"total": tuple(row), "correct": tuple(row), "format": (1.0,) * 3})
        for row in rewards
    ]
    found = metrics.reward_metrics(groups, torch.tensor(rewards))
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


def test_tokens_without_a_gradient_are_in_the_means_of_all_and_in_no_loss(monkeypatch):
    """Looked-at tokens count in the plain names of a complete step, and never in trained/*, losses and norms."""
    monkeypatch.setattr(metrics, "reduce_over_ranks", lambda values, op: {k: v.item() for k, v in values.items()})

    def found(complete):
        measured = metrics.UpdateMetrics(complete=complete, always=False)
        for value, trained in ((1.0, True), (7.0, False)):
            values = torch.full((1, 2), value)
            row = SimpleNamespace(weights_BK=torch.ones(1, 2), sampled_logprobs_BK=values)
            terms = dict(loss_BK=values, policy_BK=values, old_logprobs_BK=values, means={"entropy": values})
            measured.add(row, SimpleNamespace(**terms), trained=trained)
        measured.end(1.0)
        return measured.over_ranks(sampler_known=True)

    both, only = found(True), found(False)
    assert (both["entropy"], both["trained/entropy"], both["loss"]) == (4.0, 1.0, 2.0)
    assert "entropy" not in only and only["trained/entropy"] == 1.0
    assert only == {name: value for name, value in both.items() if name in only}


def test_without_a_token_that_counts_there_is_no_mean(monkeypatch):
    monkeypatch.setattr(metrics, "reduce_over_ranks", lambda values, op: {k: v.item() for k, v in values.items()})
    measured, values = metrics.UpdateMetrics(complete=True, always=True), torch.ones(1, 2)
    row = SimpleNamespace(weights_BK=torch.zeros(1, 2), sampled_logprobs_BK=values)
    terms = dict(loss_BK=values, policy_BK=values, old_logprobs_BK=values, means={"entropy": values})
    measured.add(row, SimpleNamespace(**terms))
    measured.end(2.0)
    assert measured.over_ranks(sampler_known=True) == {"loss": 0.0, "policy_loss": 0.0, "grad_norm": 2.0}
