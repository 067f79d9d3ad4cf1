"""Sampling ahead of training: of which weights the rollouts of a step are, and that a resumed run samples the same."""

import json
import re

import pytest
from jobs import run_jobs

STEPS = 6
AHEAD_2 = ["rollout.max_staleness=2", f"steps={STEPS}", "checkpoint.every=3", "evaluation.prompts=0"]


def said(run, what):
    return [json.loads(line) for line in re.findall(rf"{what} on rank 0 (.*)", run.output)]


def timeless(run):
    return [{k: v for k, v in record.items() if not k.startswith(("time/", "perf/"))} for record in run.training]


@pytest.fixture(scope="module")
def ahead(tmp_path_factory):
    """One step ahead of training, without checkpoints."""
    overrides = ["rollout.max_staleness=1", "steps=4", "evaluation.prompts=0", "metrics.peak_tflops=1000"]
    (run,) = run_jobs(tmp_path_factory.mktemp("ahead") / "jobs", overrides, fault="told_sampler")
    assert run.returncode == 0, run.output
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two steps ahead, with checkpoints after three and six."""
    (run,) = run_jobs(tmp_path_factory.mktemp("whole") / "jobs", AHEAD_2, fault="told_sampler")
    assert run.returncode == 0, run.output
    return run


def test_rollouts_are_of_the_weights_one_step_before(ahead):
    """Except those of the first step, before which there is none."""
    assert said(ahead, "collected") == [[0], [0], [1], [2]]
    assert [record["rollout/staleness"] for record in ahead.training] == [0, 1, 1, 1]
    asked = said(ahead, "asked")
    assert [(each["step"], each["version"]) for each in asked] == [(0, 0), (1, 0), (2, 1), (3, 2)]


def test_what_is_sampled_ahead_has_flops_and_no_rate(ahead):
    """The last step samples nothing: its rollouts over its time would be a rate of no device."""
    for record in ahead.training:
        assert record["perf/flops_rollout"] > 0 and "perf/mfu_rollout" not in record
        timed = sum(record.get(f"perf/flops_{phase}", 0) for phase in ("update", "metrics", "logprobs"))
        assert record["perf/mfu"] > 0 and "perf/mfu_unavailable" not in record
        assert record["perf/mfu_step"] == pytest.approx(timed / record["perf/step_time"] / 1e15)


def test_the_same_problems_are_asked_for_and_only_the_weights_are_older(ahead, tmp_path):
    (fresh,) = run_jobs(tmp_path / "jobs", ["steps=4", "evaluation.prompts=0"], fault="told_sampler")
    assert fresh.returncode == 0, fresh.output
    assert [each["problems"] for each in said(ahead, "asked")] == [each["problems"] for each in said(fresh, "asked")]
    assert said(fresh, "collected") == [[0], [1], [2], [3]] and "rollout/staleness" not in fresh.training[0]
    assert timeless(ahead)[0] == timeless(fresh)[0] | {"rollout/staleness": 0}
    # What is stale differs from the policy that it trains; what is fresh differs by rounding.
    gaps = [[r["trained/sampling/logp_difference/max"] for r in run.training] for run in (ahead, fresh)]
    assert max(gaps[1]) < 1e-3 < min(gaps[0][1:])


def test_nothing_is_asked_for_beyond_a_checkpoint(whole):
    assert said(whole, "collected") == [[0], [0], [0], [3], [3], [3]]
    assert [record["rollout/staleness"] for record in whole.training] == [0, 1, 2, 0, 1, 2]


def test_a_run_that_resumes_at_a_checkpoint_equals_the_uninterrupted_one(whole, tmp_path):
    step = whole.directory / "checkpoints" / "step_00000003"
    (resumed,) = run_jobs(tmp_path / "jobs", [*AHEAD_2, f"resume={step}"])
    assert resumed.returncode == 0, resumed.output
    assert timeless(resumed) == timeless(whole)[3:] and len(resumed.training) == 3
