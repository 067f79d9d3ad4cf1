"""The checks that span several fields, or that a type does not tell. No torch, no Hydra."""

from __future__ import annotations

from posttrain.config import (
    Architecture,
    ArithmeticConf,
    FileConf,
    GRPOConf,
    JobConf,
    SFTConf,
    Strategy,
    hybrid_shard_size,
)
from posttrain.config.loss import AdvantageScale, Baseline, CorrectionLevel, KLEstimator, LossConf, Surrogate


def problems(cfg: JobConf, world: int) -> list[str]:
    """What is wrong with a job for `world` ranks, every error at once, each with what to type instead."""
    rules = [*_common(cfg), *(_training(cfg, world) if isinstance(cfg, GRPOConf | SFTConf) else [])]
    if isinstance(cfg, GRPOConf):
        rules += [*_grpo(cfg), *_surrogate(cfg.loss), *_loss(cfg)]
    if cfg.model.architecture is Architecture.auto and cfg.model.path is None:
        rules.append((False, "model=auto needs weights: type model.path=<hub name or directory>"))
    return [message for holds, message in rules if not holds]


def _common(cfg: JobConf) -> list[tuple[bool, str]]:
    rollout, task, evaluation, launch = cfg.rollout, cfg.task, cfg.evaluation, cfg.launch
    return [
        (0 < rollout.top_p <= 1, f"rollout.top_p={rollout.top_p}: must be above 0 and at most 1"),
        _least("rollout.max_new_tokens", rollout.max_new_tokens, 1),
        _least("rollout.batch_size", rollout.batch_size, 1),
        _least("task.max_prompt_tokens", task.max_prompt_tokens, 1),
        _least("evaluation.prompts", evaluation.prompts, 0 if isinstance(cfg, GRPOConf | SFTConf) else 1),
        (0 <= cfg.seed < 2**63, f"seed={cfg.seed}: must be at least 0 and below 2^63"),
        *([_least("task.heldout", task.heldout, 0)] if isinstance(task, ArithmeticConf | FileConf) else []),
        *([_least("task.largest", task.largest, 1)] if isinstance(task, ArithmeticConf) else []),
        _least("evaluation.temperature", evaluation.temperature, 0),
        (
            min(task.reward_correct, task.reward_format) >= 0 and task.reward_correct + task.reward_format > 0,
            f"task.reward_correct={task.reward_correct} task.reward_format={task.reward_format}: "
            "weights must be 0 or more, and not both 0",
        ),
        _auto_or_count("launch.nproc", launch.nproc),
        _auto_or_count("launch.threads", launch.threads),
        (launch.timeout_s > 0, f"launch.timeout_s={launch.timeout_s}: must be above 0"),
    ]


def _training(cfg: GRPOConf | SFTConf, world: int) -> list[tuple[bool, str]]:
    betas, budget, pad = cfg.optim.betas, cfg.packing.tokens_per_row, cfg.packing.pad_multiple
    return [
        _least("evaluation.every", cfg.evaluation.every, 0),
        _least("steps", cfg.steps, 1),
        (cfg.optim.lr > 0, f"optim.lr={cfg.optim.lr}: must be above 0"),
        (
            len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
            f"optim.betas={betas}: must be two numbers, each at least 0 and below 1",
        ),
        _least("optim.weight_decay", cfg.optim.weight_decay, 0),
        (cfg.optim.max_grad_norm > 0, f"optim.max_grad_norm={cfg.optim.max_grad_norm}: must be above 0"),
        _least("optim.warmup_steps", cfg.optim.warmup_steps, 0),
        _least("optim.max_skipped", cfg.optim.max_skipped, 1),
        _least("packing.tokens_per_row", budget, 1),
        _least("packing.pad_multiple", pad, 1),
        (
            pad < 1 or budget % pad == 0,
            f"packing.tokens_per_row={budget} is no multiple of packing.pad_multiple={pad}: rows would be padded past "
            f"the budget; type packing.tokens_per_row={max(budget // max(pad, 1), 1) * pad}",
        ),
        _hybrid(cfg, world),
        *([_least("batch_size", cfg.batch_size, 1)] if isinstance(cfg, SFTConf) else []),
    ]


def _grpo(cfg: GRPOConf) -> list[tuple[bool, str]]:
    loss, peak, alone = cfg.loss, cfg.metrics.peak_tflops, cfg.loss.advantage_baseline is Baseline.batch
    return [
        (cfg.rollout.temperature > 0, f"rollout.temperature={cfg.rollout.temperature}: must be above 0"),
        _least("rollout.group_size", cfg.rollout.group_size, 1),
        (
            cfg.rollout.group_size != 1 or alone,
            "rollout.group_size=1: GRPO compares completions of one prompt, it needs 2 or more; "
            "or type loss.advantage_baseline=batch loss.advantage_scale=batch_tokens",
        ),
        _least("prompts_per_step", cfg.prompts_per_step, 1),
        _least("loss.updates_per_rollout", loss.updates_per_rollout, 1),
        _least("loss.mini_batches", loss.mini_batches, 1),
        (
            loss.mini_batches <= max(cfg.prompts_per_step, 1),
            f"loss.mini_batches={loss.mini_batches}: each needs a prompt, and there are "
            f"prompts_per_step={cfg.prompts_per_step}",
        ),
        _least("checkpoint.every", cfg.checkpoint.every, 0),
        _least("checkpoint.keep", cfg.checkpoint.keep, 0),
        (peak is None or peak > 0, f"metrics.peak_tflops={peak}: must be above 0, or null"),
    ]


def _surrogate(loss: LossConf) -> list[tuple[bool, str]]:
    """Each surrogate has bounds of its own; a value that would have no effect is refused."""
    low, high, dual, name = loss.clip_low, loss.clip_high, loss.dual_clip, loss.surrogate
    taus = (loss.sapo_tau_positive, loss.sapo_tau_negative)
    sapo = name is Surrogate.sapo
    return [
        (low is None or 0 < low < 1, f"loss.clip_low={low}: must be above 0 and below 1"),
        (high is None or high > 0, f"loss.clip_high={high}: must be above 0"),
        (
            name is not Surrogate.clip or None not in (low, high),
            "loss.surrogate=clip needs both bounds: type loss.clip_low=0.2 loss.clip_high=0.2",
        ),
        (name is not Surrogate.cispo or high is not None, "loss.surrogate=cispo needs a bound: type loss.clip_high=4"),
        (
            not sapo or (low, high) == (None, None),
            "loss.surrogate=sapo has no clip: type loss.clip_low=null loss.clip_high=null",
        ),
        (
            all(tau is not None and tau > 0 for tau in taus) if sapo else taus == (None, None),
            "loss.surrogate=sapo needs loss.sapo_tau_positive and loss.sapo_tau_negative above 0: type loss=sapo"
            if sapo
            else f"loss.sapo_tau_positive={taus[0]} loss.sapo_tau_negative={taus[1]}: only for loss=sapo; type null",
        ),
        (
            dual is None or name is Surrogate.clip,
            f"loss.dual_clip={dual} has no effect with loss.surrogate={name}: type loss.dual_clip=null",
        ),
        (
            dual is None or high is None or dual > 1 + high or name is not Surrogate.clip,
            f"loss.dual_clip={dual}: must be above 1 + loss.clip_high, the usual value is 3",
        ),
    ]


def _loss(cfg: GRPOConf) -> list[tuple[bool, str]]:
    loss, kl, correction, overlong = cfg.loss, cfg.loss.kl, cfg.loss.correction, cfg.loss.overlong
    corrects = correction.level is not CorrectionLevel.none
    by_batch = loss.advantage_baseline is Baseline.batch
    drift = loss.off_policy_threshold
    return [
        (
            not (by_batch and loss.advantage_scale is AdvantageScale.group),
            "loss.advantage_baseline=batch compares with the whole step, loss.advantage_scale=group with the group: "
            "type loss.advantage_scale=batch_tokens, batch or none",
        ),
        (
            not (by_batch and loss.dynamic_sampling),
            f"loss.dynamic_sampling={loss.dynamic_sampling} replaces groups of equal rewards, which teach too with "
            "loss.advantage_baseline=batch: type loss.dynamic_sampling=0",
        ),
        _least("loss.dynamic_sampling", loss.dynamic_sampling, 0),
        _least("loss.kl.coefficient", kl.coefficient, 0),
        (
            not (kl.coefficient and kl.estimator is KLEstimator.k1 and not kl.unbiased),
            "loss.kl.estimator=k1: its gradient is 0 on average, it penalises nothing: type loss.kl.unbiased=true or "
            "loss.kl.estimator=k3",
        ),
        (
            not (kl.unbiased and kl.estimator is KLEstimator.k2),
            "loss.kl.unbiased=true: the gradient of k2 is that of the KL divergence without it: type "
            "loss.kl.unbiased=false or loss.kl.estimator=k3",
        ),
        _least("loss.kl.refresh_every", kl.refresh_every, 0),
        (
            kl.refresh_every < 1 or kl.coefficient > 0,
            f"loss.kl.refresh_every={kl.refresh_every}: no reference to refresh: type loss.kl.coefficient=1e-3",
        ),
        (0 < kl.refresh_mix <= 1, f"loss.kl.refresh_mix={kl.refresh_mix}: must be above 0 and at most 1"),
        _least("loss.entropy_coefficient", loss.entropy_coefficient, 0),
        (
            0 <= correction.floor <= 1 <= correction.cap,
            f"loss.correction.floor={correction.floor} loss.correction.cap={correction.cap}: "
            "must be from 0 to 1, and 1 or more: without a gap the ratio is 1",
        ),
        (drift is None or drift > 0, f"loss.off_policy_threshold={drift}: must be above 0, or null"),
        (
            cfg.rollout.top_p >= 1 or not (corrects or drift is not None),
            f"rollout.top_p={cfg.rollout.top_p}: the sampler's logprobs are of the tokens that it kept, and cannot be "
            "compared with the trainer's: type rollout.top_p=1, or loss.correction.level=none "
            "loss.off_policy_threshold=null",
        ),
        (
            0 <= overlong.buffer <= 1,
            f"loss.overlong.buffer={overlong.buffer}: a part of rollout.max_new_tokens, 0 to 1",
        ),
        (overlong.factor > 0, f"loss.overlong.factor={overlong.factor}: must be above 0"),
    ]


def _least(key: str, value: float, least: int) -> tuple[bool, str]:
    return value >= least, f"{key}={value}: must be {least} or more"


def _auto_or_count(key: str, value: int | str) -> tuple[bool, str]:
    holds = value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)
    return holds, f"{key}={value}: must be auto, or a whole number from 1"


def _hybrid(cfg: GRPOConf | SFTConf, world: int) -> tuple[bool, str]:
    """shard_size under another strategy is ignored, so that a sweep over strategies can set it once."""
    if cfg.fsdp.strategy is not Strategy.hybrid_shard:
        return True, ""
    size, given = hybrid_shard_size(cfg.fsdp, world), cfg.fsdp.shard_size
    possible = [k for k in range(2, world // 2 + 1) if world % k == 0]
    advice = (
        f"type fsdp.shard_size={' or '.join(map(str, possible))}"
        if possible
        else "type launch.nproc=4 or another product, or fsdp=full_shard"
    )
    return size in possible, (
        f"fsdp=hybrid_shard needs 2 or more groups of 2 or more ranks, and {world} rank{'s' * (world > 1)} "
        f"cannot be cut into {f'groups of {given}' if given else 'such groups'}: {advice}"
    )
