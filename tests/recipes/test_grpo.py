"""recipes/grpo.py as a user types it, against GRPO written out one document at a time on one process."""

import itertools

import pytest
import torch
from conftest import typed
from jobs import run_jobs
from reference_grpo import assert_equals, reference
from safetensors.torch import load_file

from posttrain.config import Architecture, ModelConf
from posttrain.models import gdn_packing
from posttrain.models.loading import load

FAMILIES = ["qwen3_5_dense", "qwen3_5_moe", "qwen3_next", "qwen3_dense"]
FULL_EVERY = {"thd": 1, "padded": 10}  # of the two packings' jobs


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """(family, packing) -> run, on one start of a rank."""
    keys, budget = list(itertools.product(FAMILIES, FULL_EVERY)), "packing.tokens_per_row=64"
    jobs = [[f"model={f}", f"packing={p}", budget, f"metrics.full_every={FULL_EVERY[p]}"] for f, p in keys]
    return dict(zip(keys, run_jobs(tmp_path_factory.mktemp("families") / "jobs", *jobs), strict=True))


@pytest.mark.parametrize("packing", ["thd", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_in_both_packings_against_the_reference(families, family, packing):
    run = families[family, packing]
    assert_equals(run, reference(family=family), tolerance=1e-5, full_every=FULL_EVERY[packing])
    assert run.training[0]["packing/micro_batches"] > 1
    packing_facts = run.summary["packing"]
    assert packing_facts["mode"] == packing and packing_facts["verified"]
    assert run.summary["sharding"] == "full_shard" and run.summary["world_size"] == 1
    assert run.summary["mfu"]["available"], run.summary["mfu"]


def test_two_updates_on_the_same_rollouts(grpo):
    run = grpo("algorithm.updates_per_rollout=2", "packing.tokens_per_row=64")
    assert_equals(run, reference(updates=2))
    for record in run.training:  # the sampler against the policy that sampled, not the one after an update
        for prefix in ("", "trained/") if record["step"] == 1 else ("trained/",):
            assert record[f"{prefix}sampling/logp_difference/max"] < 1e-3
            assert record[f"{prefix}sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-3)


def test_dr_grpo_and_a_tight_gradient_clip(grpo):
    run = grpo("algorithm=dr_grpo", "optim.max_grad_norm=0.01", "packing.tokens_per_row=64")
    assert_equals(run, reference(variant="dr_grpo", max_norm=0.01))


def test_two_ranks(tmp_path):
    """Three prompts: not divisible by the ranks. The other strategies are compared on four ranks."""
    run = typed(tmp_path / "run", "launch.nproc=2", "prompts_per_step=3", "packing.tokens_per_row=64")
    assert_equals(run, reference(prompts=3))
    assert run.summary["world_size"] == 2 and run.summary["sharding"] == "full_shard"


def test_the_options_that_must_not_change_the_mathematics(grpo):
    run = grpo("model.gradient_checkpointing=true", "model.attention=eager", "packing.pad_multiple=32", "metrics=none")
    assert_equals(run, reference())
    assert run.summary["mfu"] == {"available": False, "reason": "metrics=none"}
    assert not any(name.startswith("perf/mfu") for record in run.records for name in record)
    assert run.training[0]["packing/fill"] < 1


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_bf16(grpo, strategy):
    """bf16 compute is near fp32, and fp32 master weights move at a rate that bf16 ones would round away."""
    run = grpo("model.dtype=bf16", f"fsdp={strategy}", "optim.lr=1e-6", "checkpoint.every=2")
    assert run.returncode == 0, run.output
    assert run.summary["sharding"] == strategy
    (row,) = reference(steps=1)
    first = run.training[0]
    assert 0 < first["sampling/logp_difference/mean"] < 0.05  # two bf16 paths; 1e-6 in fp32
    if first["reward"] == pytest.approx(row["reward"]):  # the same samples, unless rounding turned one
        assert first["loss"] == pytest.approx(row["loss"], abs=0.03)
        assert first["grad_norm"] == pytest.approx(row["grad_norm"], rel=0.1)
    held = load_file(run.directory / "checkpoints" / "step_00000002" / "rank_00000.safetensors")
    weights = {name.removeprefix("model."): tensor for name, tensor in held.items() if name.startswith("model.")}
    before = dict(load(ModelConf(architecture=Architecture.qwen3_5_dense))[0].named_parameters())
    moved = torch.cat([(weights[name] - parameter).flatten().abs() for name, parameter in before.items()])
    assert weights["model.norm.weight"].dtype is torch.float32
    assert 0 < moved.max() < 5e-6 and (moved > 0).float().mean() > 0.9


def test_gradient_checkpointing_recomputes():
    model, _ = load(ModelConf(architecture=Architecture.qwen3_5_dense, gradient_checkpointing=True))
    gdn_packing.patch(model)
    calls = []
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    model(input_ids=torch.ones(1, 5, dtype=torch.long), use_cache=False).logits.sum().backward()
    assert len(calls) == 2


def test_nothing_to_learn_is_a_step_like_any_other(grpo):
    """One token is never a finished answer: all rewards are 0, no document has a gradient."""
    run = grpo("rollout.max_new_tokens=1")
    assert run.returncode == 0, run.output
    for record in run.training:
        assert record["reward"] == record["loss"] == record["grad_norm"] == 0 and record["frac_reward_zero_std"] == 1
        absent = {"trained/entropy", "packing/fill", "perf/mfu", "perf/mfu_unavailable"}  # and not wrong
        assert not absent & set(record) and record["perf/mfu_rollout"] > 0
    first, second = run.training
    assert first["entropy"] == pytest.approx(reference(max_new_tokens=1)[0]["entropy"], abs=1e-5)
    assert first["perf/mfu_metrics"] > 0 and first["clip_ratio/region_mean"] == 0
    assert not {"entropy", "perf/mfu_metrics", "clip_ratio/region_mean"} & set(second)  # not a full step


def test_records_carry_the_names_of_the_field(tmp_path):
    run = typed(tmp_path / "run", "model=qwen3_5_dense", "packing=thd", "packing.tokens_per_row=64")
    names = set(run.training[0])
    assert names >= {
        "step", "loss", "reward", "reward_std", "frac_reward_zero_std", "grad_norm", "learning_rate", "entropy",
        "rewards/correct/mean", "rewards/correct/std", "rewards/format/mean", "completions/mean_length",
        "completions/min_length", "completions/max_length", "completions/clipped_ratio", "num_tokens",
        "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "sampling/logp_difference/mean",
        "sampling/logp_difference/max", "sampling/kl", "sampling/importance_sampling_ratio/min", "policy_loss",
        "sampling/importance_sampling_ratio/mean", "sampling/importance_sampling_ratio/max", "perf/mfu",
        "perf/tflops_per_device", "perf/hfu", "perf/flops_update", "perf/flops_rollout",
        "perf/tokens_per_second", "perf/step_time", "perf/max_memory_gb", "perf/warmup", "time/rollout",
        "time/reward", "time/update", "time/metrics", "packing/fill", "packing/rank_imbalance", "trained/entropy",
        "perf/flops_metrics", "perf/mfu_metrics", "trained/sampling/kl", "trained/clip_ratio/region_mean",
    }  # fmt: skip
    assert [record["step"] for record in run.training] == [1, 2]
    first = run.training[0]
    assert first["sampling/logp_difference/max"] < 1e-3 and first["clip_ratio/region_mean"] == 0
    assert not {"time/logprobs", "perf/flops_logprobs", "kl"} & names  # one optimizer step, no penalty: no further pass
    assert run.summary["packing"]["kernels"]["logprobs"] == "by chunks of the vocabulary"
    summary = run.summary
    assert summary["status"] == "completed" and summary["error"] is None and summary["steps"] == 2
    assert summary["parameters"] > 300_000 and summary["reward"]["first_tenth"] == first["reward"]
    assert summary["tokens"] == sum(record["num_tokens"] for record in run.training)
    assert summary["evaluation"]["eval/prompts"] == 8 and run.records[-1]["eval/reward"] >= 0
    assert "${" in (run.directory / "config.yaml").read_text()
    assert "verified" in run.output and "embedded tiny" in run.output


def test_the_format_reward_can_be_switched_off(grpo):
    sampling = ["rollout.temperature=0.6", "rollout.top_p=0.9", "rollout.batch_size=5"]
    run = grpo("task.reward_format=0", "task.reward_correct=1", "packing.verify=false", *sampling)
    assert run.returncode == 0, run.output
    assert run.summary["packing"]["verified"] is False and "NOT verified" in run.output
    for record in run.training:
        assert record["reward"] == pytest.approx(record["rewards/correct/mean"], abs=1e-6)
        assert not any(name.startswith("sampling/") for name in record)  # top_p: two distributions on purpose
