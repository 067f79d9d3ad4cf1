"""The variants of GRPO in the whole recipe: against formulas written out, over ranks, and when something goes wrong."""

import json
import re

import pytest
import torch
from accumulation_ranks import write_gradients
from jobs import run_jobs
from ranks import on_ranks
from reference_grpo import TOKEN_LOSS, assert_equals, reference

from posttrain.config.task import ArithmeticConf, TaskName
from posttrain.models.stored import header
from posttrain.models.tiny import tiny_tokenizer
from posttrain.tasks import batch, make_task

SPLIT = ["algorithm.updates_per_rollout=2", "algorithm.mini_batches=2", "packing.tokens_per_row=64"]
TASK = ArithmeticConf(name=TaskName.arithmetic, largest=49)
NO_REDRAW = "algorithm.dynamic_sampling=0"
PENALTIES = ["algorithm.kl.coefficient=0.05", "algorithm.entropy_coefficient=0.01"]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """name -> run: everything that one rank can show, on one start."""
    jobs = {name: [f"algorithm={name}", NO_REDRAW, *SPLIT] for name in TOKEN_LOSS}
    jobs["mini-batches"] = ["algorithm.mini_batches=4", "packing.tokens_per_row=64"]
    jobs["penalties"] = [*PENALTIES, "algorithm.kl.refresh_every=2", "algorithm.kl.reference=cpu", "steps=3", *SPLIT]
    jobs["temperature"] = ["rollout.temperature=0.6", *SPLIT]
    jobs["truncated"] = ["algorithm=reinforce_pp", "algorithm.mask_truncated=true", "rollout.max_new_tokens=3", *SPLIT]
    jobs["all on"] = ALL_ON
    directory = tmp_path_factory.mktemp("one_rank")
    return dict(zip(jobs, run_jobs(directory / "jobs", *jobs.values()), strict=True))


ALL_ON = [
    "algorithm=dapo", *SPLIT, *PENALTIES, "algorithm.kl.unbiased=true", "algorithm.correction.level=token",
    "algorithm.dual_clip=3", "algorithm.off_policy_threshold=0.001", "algorithm.mask_truncated=true",
    "rollout.group_size=3", "prompts_per_step=5", "steps=3", "packing=padded",
]  # fmt: skip


@pytest.mark.parametrize("variant", TOKEN_LOSS)
def test_each_variant_with_four_optimizer_steps_a_rollout(one_rank, variant):
    run = one_rank[variant]
    assert_equals(run, reference(variant=variant, updates=2, mini_batches=2), tolerance=2e-5)
    first = run.training[0]
    assert first["time/logprobs"] > 0 and first["perf/mfu_logprobs"] > 0
    clipped = first.get("clip_ratio/region_mean")
    assert clipped is None if variant == "sapo" else clipped > 0 or variant in ("cispo", "rloo"), clipped


def test_penalty_and_bonus_with_a_reference_that_moves(one_rank):
    rows = reference(updates=2, mini_batches=2, steps=3, kl=0.05, entropy=0.01, refresh_every=2)
    fixed = reference(updates=2, mini_batches=2, steps=3, kl=0.05, entropy=0.01)
    assert_equals(one_rank["penalties"], rows, tolerance=2e-5)
    assert rows[0]["kl"] > 0 and abs(rows[2]["kl"] - fixed[2]["kl"]) > 1e-3  # the third step begins at a new reference


def test_mini_batches_of_one_pass(one_rank):
    """All but the first compare with a policy that is updated already."""
    assert_equals(one_rank["mini-batches"], reference(mini_batches=4), tolerance=2e-5)


def test_packing_is_part_of_the_updates_time(tmp_path):
    (run,) = run_jobs(tmp_path / "jobs", ["steps=1"], fault="slow_packing")
    assert run.returncode == 0, run.output
    assert 3 < run.training[0]["time/update"] <= run.training[0]["perf/step_time"]


def test_each_pass_is_billed(one_rank):
    """An update costs about three forwards: two passes over all are 6 times the one for old logprobs.

    In a full step the tokens without a gradient are billed too, once in each pass: to be measured, and for logprobs.
    """
    for name, updates, passes in (("grpo", 2, 1), ("penalties", 2, 2), ("mini-batches", 1, 1)):
        full, second, *_ = one_rank[name].training
        watched = full.get("perf/flops_metrics", 0.0)
        assert (watched > 0) == (name != "penalties") and "perf/flops_metrics" not in second, name
        for record, measured in ((full, watched), (second, 0.0)):
            forward = record["perf/flops_logprobs"] / passes - measured / updates
            assert record["perf/flops_update"] / forward == pytest.approx(3 * updates, rel=0.1), name


def test_another_temperature(one_rank):
    assert_equals(one_rank["temperature"], reference(updates=2, mini_batches=2, temperature=0.6), tolerance=2e-5)


def test_truncated_completions_do_not_count(one_rank):
    run = one_rank["truncated"]
    rows = reference(variant="reinforce_pp", updates=2, mini_batches=2, max_new_tokens=3, mask_truncated=True)
    assert_equals(run, rows, tolerance=2e-5)
    assert any(0 < record["completions/clipped_ratio"] < 0.9 for record in run.training)


def test_a_reference_that_has_moved_survives_a_resume(tmp_path):
    moving = [
        "algorithm.kl.coefficient=0.05",
        "algorithm.kl.refresh_every=1",
        "algorithm.kl.refresh_mix=0.5",
        "steps=4",
    ]
    (whole,) = run_jobs(tmp_path / "whole", [*moving, "checkpoint.every=2"])
    (resumed,) = run_jobs(tmp_path / "resumed", [*moving, f"resume={whole.directory}/checkpoints/step_00000002"])
    assert whole.returncode == resumed.returncode == 0, whole.output + resumed.output
    held = header(whole.directory / "checkpoints" / "step_00000002" / "rank_00000.safetensors")
    assert any(name.startswith("reference.") for name in held)
    timeless = [
        [{k: v for k, v in record.items() if not k.startswith(("perf/", "time/"))} for record in run.training]
        for run in (whole, resumed)
    ]
    assert timeless[0][2:] == timeless[1] and timeless[1][0]["kl"] > 0


def test_two_ranks_log_what_one_rank_logs(one_rank, tmp_path):
    """With everything on: what counts tokens is weighted by tokens, whatever rank and micro-batch they are in."""
    (two,) = run_jobs(tmp_path / "jobs", [*ALL_ON, "fsdp=full_shard"], nproc=2)
    one = one_rank["all on"]
    assert one.returncode == two.returncode == 0, one.output + two.output
    assert (one.summary["world_size"], two.summary["world_size"]) == (1, 2)
    assert two.summary["sharding"] == "full_shard"
    names = {name for name in one.training[0] if not name.startswith(("perf/", "time/", "packing/"))}
    assert names >= {
        "loss", "policy_loss", "kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean",
        "correction/weight", "correction/outside", "off_policy_masked", "sampling/kl", "rewards/overlong/mean",
        "dynamic_sampling/prompts", "grad_norm", "sampling/importance_sampling_ratio/max",
    }  # fmt: skip
    for a, b in zip(one.training, two.training, strict=True):
        for name in names:
            assert a[name] == pytest.approx(b[name], rel=2e-3, abs=2e-5), name
    assert any(record["off_policy_masked"] > 0 for record in one.training)


def test_dynamic_sampling_replaces_groups_of_equal_rewards(tmp_path):
    jobs = [["algorithm.dynamic_sampling=30"], ["algorithm.dynamic_sampling=1"]]
    base = ["rollout.group_size=2", "prompts_per_step=6"]
    patient, hasty = run_jobs(tmp_path / "jobs", *([*base, *job] for job in jobs), fault="watched_policy")
    assert patient.returncode == 0, patient.output
    seen = [json.loads(found) for found in re.findall(r"advantages (\[\[.*\]\])", patient.output)]
    assert len(seen) == 4 and all(len(advantages) == 6 for advantages in seen)
    assert all(a != 0 != b for advantages in seen[:2] for a, b in advantages)  # each group teaches
    assert any(a == 0 == b for advantages in seen[2:4] for a, b in advantages)  # filled up after one try
    for record, most in [*((r, 6 * 31) for r in patient.training), *((r, 12) for r in hasty.training)]:
        assert 6 < record["dynamic_sampling/prompts"] <= most
        assert 0 < record["frac_reward_zero_std"] < 1  # of all that was sampled


def test_a_step_that_is_not_finite_is_skipped_on_all_ranks(tmp_path):
    """Rank 1 alone has a NaN; the two optimizer steps around it are taken."""
    overrides = ["steps=3", "packing.tokens_per_row=64"]
    (run,) = run_jobs(tmp_path / "jobs", overrides, nproc=2, fault="nan_on_the_last_rank")
    assert run.returncode == 0, run.output
    said = sorted(re.findall(r"optimizer step (\d) on rank (\d): taken (\w+), unchanged (\w+)", run.output))
    taken = [(str(n), str(r), str(n != 2), str(n == 2)) for n in (1, 2, 3) for r in (0, 1)]
    assert said == taken, run.output
    assert [record.get("skipped_updates", 0) for record in run.records if "reward" in record] == [0, 1, 0]
    assert run.summary["skipped_updates"] == 1 and "step 2: the loss of prompts [" in run.output


def test_a_gradient_that_is_not_finite_is_skipped_too(tmp_path):
    (run,) = run_jobs(tmp_path / "jobs", ["steps=3"], fault="infinite_gradient_in_the_second_step")
    assert run.returncode == 0, run.output
    assert [record.get("skipped_updates", 0) for record in run.records if "reward" in record] == [0, 1, 0]
    assert "step 2: the gradient is not finite" in run.output and run.training[-1]["grad_norm"] > 0


def test_the_run_stops_after_too_many_of_them(tmp_path):
    (run,) = run_jobs(tmp_path / "jobs", ["steps=9", "optim.max_skipped=3"], fault="always_nan")
    assert run.returncode != 0
    error = run.summary["error"]
    found = re.search(r"step 3: the loss of prompts \[(.*)\] is not finite.*3 in a row \(optim.max_skipped=3\)", error)
    shown = {p.index for p in batch(make_task(TASK, tiny_tokenizer()).train, 4, step=2, seed=0)}
    assert {int(index) for index in found[1].split(",")} <= shown
    assert run.summary["status"] == "failed" and run.summary["skipped_updates"] == 2


def test_a_step_in_between_begins_the_count_again(tmp_path):
    (run,) = run_jobs(tmp_path / "jobs", ["steps=6", "optim.max_skipped=3"], fault="nan_twice_in_a_row_and_again")
    assert run.returncode == 0, run.output
    assert run.summary["skipped_updates"] == 4 and run.output.count("is not finite") == 4


def test_unscorable_rewards_and_empty_completions(tmp_path):
    (nan,) = run_jobs(tmp_path / "nan", ["algorithm.mini_batches=2"], fault="some_rewards_unscorable")
    (empty,) = run_jobs(tmp_path / "empty", ["packing=padded", "algorithm=dapo"], fault="empty_completions")
    for run in (nan, empty):
        assert run.returncode == 0, run.output
        assert len(run.training) == 2 and all(record["loss"] == record["loss"] for record in run.training)
        assert "skipped_updates" not in run.training[0] and run.training[0]["grad_norm"] > 0
    assert nan.training[0]["frac_reward_unscorable"] == pytest.approx(6 / 16)
    assert empty.training[0]["completions/min_length"] == 0


@pytest.fixture(scope="module")
def gradients(tmp_path_factory):
    """world -> {arrangement: gradient}, in fp64."""
    found = {}
    for world in (1, 2, 4):
        out = tmp_path_factory.mktemp("accumulation") / "gradients.pt"
        ended = on_ranks(world, write_gradients, out)
        assert ended.status == 0, ended.output
        found[world] = torch.load(out)
    return found


def test_the_gradient_does_not_depend_on_micro_batches_and_ranks(gradients):
    """1 x 8 = 8 x 1 = 2 ranks = 4 ranks, lengths 1 and 50, with micro-batches and ranks on which all is masked."""
    assert len(gradients[1]) == 16
    for name in gradients[1]:
        aggregation, arrangement = name.split(", ")
        known = gradients[1][name if arrangement == "few" else f"{aggregation}, 1 micro-batch"]
        assert known.norm() > 0
        for world in (1, 2, 4):
            assert (gradients[world][name] - known).norm() <= 1e-6 * known.norm(), (name, world)
