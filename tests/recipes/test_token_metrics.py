"""Means over tokens: over all that count in some steps, over those with a gradient in every step."""

import pytest
from jobs import run_jobs
from reference_grpo import assert_equals, reference

STEPS = 4
EVERY = {"0": [], "1": [0, 1, 2, 3], "3": [0, 3]}  # metrics.full_every: its full steps
OF_TOKENS = (
    "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "sampling/kl",
    "sampling/logp_difference/mean", "sampling/logp_difference/max", "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/min", "sampling/importance_sampling_ratio/max",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Name -> run, on one start of a rank."""
    short = [f"steps={STEPS}", "evaluation.prompts=0", "packing.tokens_per_row=64"]
    jobs = {every: [*short, f"metrics.full_every={every}"] for every in EVERY}
    jobs["penalty"] = [*short, "metrics.full_every=1", "algorithm.kl.coefficient=1e-12"]
    found = run_jobs(tmp_path_factory.mktemp("runs") / "jobs", *jobs.values())
    return dict(zip(jobs, found, strict=True))


@pytest.fixture(scope="module")
def rows():
    return reference(steps=STEPS)


@pytest.mark.parametrize("every", EVERY)
def test_entropy_is_that_of_all_tokens_exactly_in_full_steps(runs, rows, every):
    assert not any(row["all trained"] for row in rows)  # some groups are rewarded all alike, in each step
    assert any(abs(row["entropy"] - row["trained/entropy"]) > 1e-2 for row in rows)
    assert_equals(runs[every], rows, tolerance=2e-5, full_every=int(every))
    for step, record in enumerate(runs[every].training):
        there = [name in record for name in (*OF_TOKENS, "time/metrics", "perf/flops_metrics")]
        assert there == [step in EVERY[every]] * len(there), (step, record)
        assert all(f"trained/{name}" in record for name in OF_TOKENS)


def test_training_does_not_feel_what_is_measured(runs):
    """Bitwise."""

    def kept(run):
        out = ("time/", "perf/", *OF_TOKENS)
        return [{k: v for k, v in record.items() if not k.startswith(out)} for record in run.training]

    assert kept(runs["0"]) == kept(runs["1"]) == kept(runs["3"])
    assert {"loss", "grad_norm", "reward", "trained/entropy"} <= kept(runs["0"])[0].keys()


def test_a_penalty_changes_no_definition(runs):
    """The same policy and samples log the same, whether or not a penalty gives every token a gradient."""
    without, penalty = runs["1"], runs["penalty"]
    assert penalty.returncode == 0, penalty.output
    for a, b in zip(without.training, penalty.training, strict=True):
        assert [a[name] for name in OF_TOKENS] == pytest.approx([b[name] for name in OF_TOKENS], abs=2e-5)
        assert "kl" in b and not any(name.startswith("trained/") for name in b)
        assert b["reward"] == a["reward"] and b["loss"] == pytest.approx(a["loss"], abs=1e-5)
