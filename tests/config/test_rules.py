"""What spans several values: refused with all that is wrong at once, or said to have no effect."""

import pytest
from composition import composer

from posttrain.config import FSDPConf, GRPOConf, Strategy, hybrid_shard_size
from posttrain.config.rules import problems


@pytest.fixture
def compose(tmp_path, monkeypatch, capsys):
    return composer(tmp_path, monkeypatch, capsys)


WRONG = {
    "seed=-1": "seed=-1",
    "steps=0": "steps=0: must be 1 or more",
    "prompts_per_step=0": "prompts_per_step=0",
    "rollout.group_size=1": "GRPO compares",
    "rollout.temperature=0": "rollout.temperature=0.0: must be above 0",
    "rollout.top_p=1.5": "rollout.top_p",
    "algorithm.clip_low=1": "algorithm.clip_low=1.0",
    "algorithm.clip_high=0": "algorithm.clip_high",
    "algorithm.updates_per_rollout=0": "algorithm.updates_per_rollout",
    "algorithm.mini_batches=0": "algorithm.mini_batches=0: must be 1 or more",
    "algorithm.dual_clip=0.5": "algorithm.dual_clip=0.5: must be above",
    "algorithm.dynamic_sampling=-1": "algorithm.dynamic_sampling",
    "algorithm.kl.coefficient=-0.1": "algorithm.kl.coefficient",
    "algorithm.kl.refresh_mix=0": "algorithm.kl.refresh_mix",
    "algorithm.entropy_coefficient=-1": "algorithm.entropy_coefficient",
    "algorithm.correction.cap=0.5": "algorithm.correction.cap=0.5",
    "algorithm.off_policy_threshold=0": "algorithm.off_policy_threshold=0.0: must be above 0, or null",
    "algorithm.overlong.buffer=2": "algorithm.overlong.buffer=2.0: a part",
    "algorithm.overlong.factor=0": "algorithm.overlong.factor=0.0",
    "optim.max_skipped=0": "optim.max_skipped=0: must be 1 or more",
    "optim.lr=0": "optim.lr=0.0",
    "optim.betas=[0.9]": "optim.betas",
    "packing.tokens_per_row=0": "packing.tokens_per_row",
    "metrics.peak_tflops=0": "metrics.peak_tflops",
    "metrics.full_every=-1": "metrics.full_every=-1: must be 0 or more",
    "rollout.max_staleness=-1": "rollout.max_staleness=-1: must be 0 or more",
    "task.reward_correct=-1": "weights must be 0 or more",
    "launch.nproc=0": "launch.nproc=0",
    "launch.timeout_s=0": "launch.timeout_s",
    "launch.grace_s=-1": "launch.grace_s=-1.0: must be 0 or more",
    "checkpoint.every=-1": "checkpoint.every",
    "checkpoint.keep_last=-1": "checkpoint.keep_last=-1: must be 0 or more",
    "checkpoint.keep_every=150": "checkpoint.keep_every=150 is no multiple of checkpoint.every=",
    "checkpoint.best=true": "checkpoint.best=true compares the evaluations of checkpoints: type evaluation.every=100",
    "evaluation.prompts=-1": "evaluation.prompts",
    "evaluation.every=-1": "evaluation.every=-1: must be 0 or more",
    "evaluation.samples=4": "evaluation.samples=4 evaluation.temperature=0: greedy samples are all equal; type",
    "evaluation.patience=3": "evaluation.patience=3 counts evaluations: type evaluation.every=10 as well",
    "task.heldout=-5": "task.heldout=-5: must be 0 or more",
    "task.largest=0": "task.largest=0: must be 1 or more",
    "fsdp=hybrid_shard": "fsdp=hybrid_shard needs",
    "reward.timeout_s=0": "reward.timeout_s=0.0: must be above 0",
    "reward.workers=0": "reward.workers=0: must be auto, or a whole number from 1",
    "reward.max_failed=2": "reward.max_failed=2.0: must be from 0 to 1",
    "reward.python=[1]": "reward.python=[1]: must be path/to/file.py:function, or a list of these",
    "reward.ngram=0": "reward.ngram=0: must be 1 or more",
    "reward.judge.attempts=0": "reward.judge.attempts=0: must be 1 or more",
    "reward.weights={correct:inf}": "reward.weights={correct:inf}: must be finite numbers",
}


OF_GRPO_ONLY = (
    "algorithm.",
    "metrics.full_every",
    "rollout.group_size",
    "rollout.temperature",
    "rollout.max_staleness",
    "prompts_per_step",
)


@pytest.mark.parametrize("recipe", ["grpo", "sft"])
def test_all_errors_at_once(compose, recipe):
    wrong = {k: v for k, v in WRONG.items() if recipe == "grpo" or not k.startswith(OF_GRPO_ONLY)}
    status, _, err = compose(*wrong, recipe=recipe)
    assert status == 2
    assert len(err.splitlines()) == len(wrong) > 15
    assert all(any(message in line for line in err.splitlines()) for message in wrong.values()), err


EDGES = ["rollout.top_p=0", "algorithm.clip_low=0", "algorithm.kl.refresh_mix=0", "optim.max_grad_norm=0", "optim.lr=0"]


@pytest.mark.parametrize("argument", EDGES)
def test_the_value_at_the_open_end_of_a_range_is_refused(compose, argument):
    status, _, err = compose(argument)
    assert status == 2 and len(err.splitlines()) == 1 and argument.partition("=")[0] in err


def test_a_budget_that_padding_would_exceed_is_refused(compose):
    status, _, err = compose("packing.tokens_per_row=100", "packing.pad_multiple=64")
    assert status == 2 and "type packing.tokens_per_row=64" in err


@pytest.mark.parametrize(
    "arguments, advice",
    [
        ("algorithm=sapo algorithm.clip_high=0.2", "type algorithm.clip_low=null algorithm.clip_high=null"),
        ("algorithm=sapo algorithm.sapo_tau_positive=null", "type algorithm=sapo"),
        ("algorithm.sapo_tau_positive=1", "only for algorithm=sapo"),
        ("algorithm.clip_high=null", "type algorithm.clip_low=0.2 algorithm.clip_high=0.2"),
        ("algorithm=cispo algorithm.clip_high=null", "type algorithm.clip_high=4"),
        ("algorithm=cispo algorithm.dual_clip=3", "type algorithm.dual_clip=null"),
        ("algorithm=gspo algorithm.dual_clip=1", "above 1 + algorithm.clip_high"),
        ("algorithm.advantage_baseline=batch", "type algorithm.advantage_scale=batch_tokens"),
        (
            "algorithm.advantage_baseline=batch algorithm.advantage_scale=none algorithm.dynamic_sampling=2",
            "algorithm.dynamic_sampling=0",
        ),
        ("algorithm.kl.coefficient=0.1 algorithm.kl.estimator=k1", "type algorithm.kl.unbiased=true"),
        (
            "algorithm.kl.coefficient=0.1 algorithm.kl.estimator=k2 algorithm.kl.unbiased=true",
            "algorithm.kl.estimator=k3",
        ),
        ("algorithm.kl.coefficient=0.1 algorithm.kl.refresh_every=1", "type more, or algorithm.kl.refresh_mix=0.5"),
        ("algorithm=reinforce_pp algorithm.dynamic_sampling=2", "algorithm.dynamic_sampling=0"),
        ("algorithm.correction.floor=1 algorithm.correction.cap=1", "and differ"),
        ("algorithm.correction.mode=mask algorithm.correction.cap=1", "masks by rounding"),
        (
            "algorithm.overlong.buffer=0.5 algorithm.overlong.factor=inf",
            "algorithm.overlong.factor=inf: must be a finite number",
        ),
        ("optim.lr=nan", "optim.lr=nan: must be a finite number"),
        (
            "rollout.group_size=1 prompts_per_step=1 "
            "algorithm.advantage_baseline=batch algorithm.advantage_scale=batch",
            "nothing to be compared with",
        ),
        ("algorithm.correction.level=token rollout.top_p=0.9", "type rollout.top_p=1"),
        ("algorithm.off_policy_threshold=0.1 rollout.top_p=0.9", "algorithm.off_policy_threshold=null"),
        ("algorithm.mini_batches=3 prompts_per_step=2", "each needs a prompt"),
        ("rollout.group_size=1", "type algorithm.advantage_baseline=batch"),
    ],
)
def test_combinations_of_an_algorithm_that_make_no_sense(compose, arguments, advice):
    status, jobs, err = compose(*arguments.split())
    assert (status, jobs) == (2, []) and advice in err and len(err.splitlines()) == 1, err


@pytest.mark.parametrize(
    "arguments",
    [
        "algorithm.kl.coefficient=0.1 algorithm.kl.estimator=k1 algorithm.kl.unbiased=true",
        "rollout.group_size=1 algorithm.advantage_baseline=batch algorithm.advantage_scale=batch_tokens",
        "algorithm=cispo algorithm.clip_low=0.2 algorithm.clip_high=0.28",
        "algorithm=dapo algorithm.mask_truncated=true "
        "algorithm.correction.level=sequence_mean algorithm.correction.mode=mask",
    ],
)
def test_combinations_of_an_algorithm_that_do(compose, arguments):
    status, jobs, err = compose(*arguments.split())
    assert (status, len(jobs), err) == (0, 1, "")


@pytest.mark.parametrize(
    "arguments, note",
    [
        (
            "algorithm.kl.estimator=k2 algorithm.kl.refresh_every=5",
            "algorithm.kl.estimator=k2 algorithm.kl.refresh_every=5 without effect",
        ),
        ("algorithm.correction.cap=5", "algorithm.correction.cap=5.0 without effect: algorithm.correction.level=none"),
        ("algorithm.overlong.factor=3", "algorithm.overlong.factor=3.0 without effect: algorithm.overlong.buffer=0.0"),
        (
            "algorithm=gspo algorithm.dual_clip=3",
            "algorithm.ratio=sequence_mean algorithm.dual_clip=3.0 without effect on gradients",
        ),
        (
            "rollout.max_staleness=2",
            "rollout.max_staleness=2: rollouts of older weights are trained on uncorrected. "
            "algorithm.correction.level=token corrects",
        ),
        ("rollout.max_staleness=2 algorithm.correction.level=token", ""),
        ("algorithm.kl.coefficient=0.1 algorithm.kl.refresh_mix=0.5", "algorithm.kl.refresh_mix=0.5 without effect"),
        ("algorithm=gspo algorithm.mini_batches=2", ""),
        ("algorithm=rloo", ""),  # the ratio of a completion has the gradient of all its tokens on each
        ("optim.max_grad_norm=inf", ""),
        ("algorithm.kl.estimator=k2 algorithm.kl.coefficient=0.1", ""),
    ],
)
def test_what_has_no_effect_is_said(compose, arguments, note):
    status, jobs, err = compose(*arguments.split())
    assert (status, len(jobs)) == (0, 1) and note in err and len(err.splitlines()) == bool(note), err


@pytest.mark.parametrize(
    "world, size, advice",
    [
        (1, None, "launch.nproc=4"),
        (2, None, "launch.nproc=4"),
        (5, None, "launch.nproc=4"),
        (4, 4, "fsdp.shard_size=2"),
        (4, 3, "fsdp.shard_size=2"),
        (8, 1, "fsdp.shard_size=2 or 4"),
        (9, None, "fsdp.shard_size=3"),
        (4, None, None),
        (4, 2, None),
        (6, 3, None),
    ],
)
def test_hybrid_shard(monkeypatch, world, size, advice):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    wrong = problems(GRPOConf(fsdp=FSDPConf(Strategy.hybrid_shard, shard_size=size)), world)
    assert len(wrong) == (advice is not None)
    assert all(advice in message for message in wrong)


def test_hybrid_shard_size_follows_the_nodes(monkeypatch):
    conf = FSDPConf(Strategy.hybrid_shard)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert [hybrid_shard_size(conf, world) for world in (8, 16, 32)] == [4, 8, 8]
    assert hybrid_shard_size(FSDPConf(Strategy.hybrid_shard, shard_size=2), 16) == 2
