"""What the first step's values are warned of: each by itself, a healthy step of nothing, and `strict`."""

import json
import re

import pytest
import torch
from conftest import typed
from jobs import run_jobs

from posttrain.config import GRPOConf, PackingConf, PackingMode, RolloutConf, SFTConf
from posttrain.metrics.first_step import suspicious

HEALTHY = {
    "loss": 0.0, "grad_norm": 0.7, "reward": 0.5, "frac_reward_zero_std": 0.2, "frac_reward_unscorable": 0.0,
    "completions/clipped_ratio": 0.1, "sampling/logp_difference/mean": 1e-5, "entropy": 0.6, "packing/fill": 0.97,
    "packing/rank_imbalance": 1.01,
}  # fmt: skip
ALONE = [
    ({"completions/clipped_ratio": 1.0}, "every completion was cut off at rollout.max_new_tokens=17.*not among <end>"),
    ({"frac_reward_zero_std": 1.0, "reward": 0.0}, r"are all equal \(0\).*too hard"),
    ({"frac_reward_zero_std": 1.0, "reward": 1.0}, r"are all equal \(1\).*too easy"),
    ({"sampling/logp_difference/mean": 0.7}, r"logp_difference/mean is 0.7 nats, above 0.005"),
    ({"grad_norm": 0.0}, "grad_norm is 0"),
    ({"entropy": 0.001}, "hardly ever varies"),
    ({"entropy": 5.5}, r"near log\(264\) = 5.58"),
    ({"packing/fill": 0.8}, "packing/fill is 0.80.*tokens_per_row"),
    ({"packing/rank_imbalance": 1.4}, "rank_imbalance is 1.40"),
]


def look(change, cfg=None, dtype=torch.float32, without=()):
    cfg = cfg or GRPOConf(rollout=RolloutConf(max_new_tokens=17), packing=PackingConf(mode=PackingMode.thd))
    metrics = {name: value for name, value in (HEALTHY | change).items() if name not in without}
    return suspicious(metrics, cfg, vocabulary=264, dtype=dtype, ends="<end>")


@pytest.mark.parametrize("change, message", ALONE)
def test_each_value_is_warned_of_by_itself(change, message):
    (warning,) = look(change)
    assert re.search(message, warning), warning


def test_a_healthy_step_is_not_warned_of():
    assert look({}) == []
    assert look({"sampling/logp_difference/mean": 0.03}, dtype=torch.bfloat16) == []
    assert look({}, SFTConf(packing=PackingConf(mode=PackingMode.thd)), without=("entropy", "reward")) == []


def test_a_gap_is_expected_of_older_weights_and_absent_with_top_p():
    older = GRPOConf(rollout=RolloutConf(max_staleness=2), packing=PackingConf(mode=PackingMode.thd))
    assert look({"sampling/logp_difference/mean": 0.7}, older) == []
    assert look({}, without=("sampling/logp_difference/mean",)) == []


def test_the_mean_over_trained_tokens_stands_in_for_the_mean_over_all():
    (warning,) = look({"trained/entropy": 0.001}, without=("entropy",))
    assert "hardly ever varies" in warning


def test_a_step_without_a_finite_gradient_and_equal_rewards_without_one():
    (warning,) = look({}, without=("grad_norm",))
    assert "the first update was skipped" in warning
    # Equal rewards have no gradient: they are the cause, and are said once.
    (warning,) = look({"frac_reward_zero_std": 1.0, "grad_norm": 0.0})
    assert "rewards of each group" in warning


def test_padding_names_itself():
    (warning,) = look({"packing/fill": 0.5}, GRPOConf(packing=PackingConf(mode=PackingMode.padded)))
    assert "packing=thd does not" in warning


@pytest.fixture(scope="module")
def cut_off(tmp_path_factory):
    """One token is never a finished answer: everything is cut off, and all rewards are equal."""
    (run,) = run_jobs(tmp_path_factory.mktemp("cut") / "jobs", ["rollout.max_new_tokens=1"])
    return run


def test_a_run_says_it_once_and_keeps_it(cut_off):
    assert cut_off.returncode == 0, cut_off.output
    warnings = cut_off.summary["warnings"]["first step"]
    assert len(warnings) == 2 and all(cut_off.output.count(f"warning (first step): {each}") == 1 for each in warnings)


def test_strict_makes_errors_of_them(tmp_path):
    run = typed(tmp_path / "run", "rollout.max_new_tokens=1", "strict=true", "evaluation.prompts=0")
    assert run.returncode == 1, run.output
    assert "strict=true: every completion was cut off" in run.output and "Traceback" not in run.output
    assert run.summary["status"] == "failed" and [record["step"] for record in run.training] == [1]


def test_the_default_run_has_no_warning(grpo):
    run = grpo()
    assert run.returncode == 0 and run.summary["warnings"] == {"first step": []}


def test_answers_that_cannot_be_scored_end_the_run(tmp_path):
    rows = "\n".join(json.dumps({"prompt": f"{n}+1=", "answer": "word"}) for n in range(12))
    (tmp_path / "words.jsonl").write_text(rows)
    (run,) = run_jobs(
        tmp_path / "jobs", ["task=jsonl", f"task.path={tmp_path}/words.jsonl", "task.answer_reward=numeric"]
    )
    assert run.returncode and "task.answer_reward=exact" in run.output
