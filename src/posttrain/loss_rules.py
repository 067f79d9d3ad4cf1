"""What makes no sense among the switches of a loss, and what has no effect. No torch, no Hydra."""

from __future__ import annotations

import dataclasses

from posttrain.config import GRPOConf, JobConf
from posttrain.config.loss import (
    AdvantageScale,
    Baseline,
    CorrectionConf,
    CorrectionLevel,
    CorrectionMode,
    KLConf,
    KLEstimator,
    LossConf,
    OverlongConf,
    Ratio,
    Surrogate,
)


def surrogate_rules(loss: LossConf) -> list[tuple[bool, str]]:
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


def loss_rules(cfg: GRPOConf) -> list[tuple[bool, str]]:
    """Which of the other switches go together."""
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
            not (loss.dynamic_sampling and (by_batch or loss.advantage_scale is AdvantageScale.batch_tokens)),
            f"loss.dynamic_sampling={loss.dynamic_sampling} replaces groups of equal rewards, which teach too when all "
            "completions of the step are compared: type loss.dynamic_sampling=0",
        ),
        least("loss.dynamic_sampling", loss.dynamic_sampling, 0),
        least("loss.kl.coefficient", kl.coefficient, 0),
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
        least("loss.kl.refresh_every", kl.refresh_every, 0),
        (
            not (kl.coefficient and kl.refresh_every == 1 and kl.refresh_mix == 1 and loss.optimizer_steps == 1),
            "loss.kl.refresh_every=1: the reference would be the policy itself in each update: type more, or "
            "loss.kl.refresh_mix=0.5",
        ),
        (0 < kl.refresh_mix <= 1, f"loss.kl.refresh_mix={kl.refresh_mix}: must be above 0 and at most 1"),
        least("loss.entropy_coefficient", loss.entropy_coefficient, 0),
        (
            0 <= correction.floor <= 1 <= correction.cap and correction.floor < correction.cap,
            f"loss.correction.floor={correction.floor} loss.correction.cap={correction.cap}: "
            "must be from 0 to 1, and 1 or more, and differ: without a gap the ratio is 1",
        ),
        (
            correction.mode is not CorrectionMode.mask or 1 not in (correction.floor, correction.cap),
            f"loss.correction.floor={correction.floor} loss.correction.cap={correction.cap}: with "
            "loss.correction.mode=mask a bound of 1 masks by rounding",
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


def idle(cfg: JobConf) -> list[str]:
    """Values that were chosen and have no effect under another one, each with what to type. A sweep may want that."""
    if not isinstance(cfg, GRPOConf):
        return []
    loss, found = cfg.loss, []
    for name, switch, off, default in (
        ("kl", "coefficient", loss.kl.coefficient == 0, KLConf()),
        ("correction", "level", loss.correction.level is CorrectionLevel.none, CorrectionConf()),
        ("overlong", "buffer", loss.overlong.buffer == 0, OverlongConf()),
    ):
        chosen = dataclasses.asdict(getattr(loss, name))
        if off and (keys := [key for key, value in dataclasses.asdict(default).items() if chosen[key] != value]):
            options = " ".join(f"loss.{name}.{key}={chosen[key]}" for key in keys)
            found.append(f"{options} without effect: loss.{name}.{switch}={chosen[switch]}")
    if loss.kl.coefficient and loss.kl.refresh_mix != 1 and not loss.kl.refresh_every:
        found.append(f"loss.kl.refresh_mix={loss.kl.refresh_mix} without effect: loss.kl.refresh_every=0")
    if loss.optimizer_steps == 1:
        options = [f"loss.ratio={loss.ratio}"] * (loss.ratio is Ratio.sequence_mean)
        options += [f"loss.surrogate={loss.surrogate}"] * (loss.surrogate is Surrogate.sapo)
        options += [f"loss.dual_clip={loss.dual_clip}"] * (loss.dual_clip is not None)
        if options:
            found.append(
                f"{' '.join(options)} without effect on gradients: with one optimizer step a rollout every ratio is 1. "
                "loss.mini_batches=4 or loss.updates_per_rollout=2 makes several"
            )
    return found


def least(key: str, value: float, least: int) -> tuple[bool, str]:
    """Does the rule hold, and what to say if not."""
    return value >= least, f"{key}={value}: must be {least} or more"
