"""What makes no sense among the switches of an algorithm, and what has no effect. No torch, no Hydra."""

from __future__ import annotations

import dataclasses

from posttrain.config import GRPOConf, JobConf
from posttrain.config.algorithm import (
    AdvantageScale,
    AlgorithmConf,
    Baseline,
    CorrectionConf,
    CorrectionLevel,
    CorrectionMode,
    KLConf,
    KLEstimator,
    OverlongConf,
    Ratio,
    Surrogate,
)


def surrogate_rules(algorithm: AlgorithmConf) -> list[tuple[bool, str]]:
    """Each surrogate has bounds of its own; a value that would have no effect is refused."""
    low, high, dual, name = algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip, algorithm.surrogate
    taus = (algorithm.sapo_tau_positive, algorithm.sapo_tau_negative)
    sapo = name is Surrogate.sapo
    return [
        (low is None or 0 < low < 1, f"algorithm.clip_low={low}: must be above 0 and below 1"),
        (high is None or high > 0, f"algorithm.clip_high={high}: must be above 0"),
        (
            name is not Surrogate.clip or None not in (low, high),
            "algorithm.surrogate=clip needs both bounds: type algorithm.clip_low=0.2 algorithm.clip_high=0.2",
        ),
        (
            name is not Surrogate.cispo or high is not None,
            "algorithm.surrogate=cispo needs a bound: type algorithm.clip_high=4",
        ),
        (
            not sapo or (low, high) == (None, None),
            "algorithm.surrogate=sapo has no clip: type algorithm.clip_low=null algorithm.clip_high=null",
        ),
        (
            all(tau is not None and tau > 0 for tau in taus) if sapo else taus == (None, None),
            "algorithm.surrogate=sapo needs algorithm.sapo_tau_positive and algorithm.sapo_tau_negative above 0: "
            "type algorithm=sapo"
            if sapo
            else f"algorithm.sapo_tau_positive={taus[0]} algorithm.sapo_tau_negative={taus[1]}: only for "
            "algorithm=sapo; type null",
        ),
        (
            dual is None or name is Surrogate.clip,
            f"algorithm.dual_clip={dual} has no effect with algorithm.surrogate={name}: type algorithm.dual_clip=null",
        ),
        (
            dual is None or high is None or dual > 1 + high or name is not Surrogate.clip,
            f"algorithm.dual_clip={dual}: must be above 1 + algorithm.clip_high, the usual value is 3",
        ),
    ]


def algorithm_rules(cfg: GRPOConf) -> list[tuple[bool, str]]:
    """Which of the other switches go together."""
    algorithm = cfg.algorithm
    kl, correction, overlong = algorithm.kl, algorithm.correction, algorithm.overlong
    corrects = correction.level is not CorrectionLevel.none
    by_batch = algorithm.advantage_baseline is Baseline.batch
    drift = algorithm.off_policy_threshold
    return [
        (
            not (by_batch and algorithm.advantage_scale is AdvantageScale.group),
            "algorithm.advantage_baseline=batch compares with the whole step, algorithm.advantage_scale=group with the "
            "group: type algorithm.advantage_scale=batch_tokens, batch or none",
        ),
        (
            not (algorithm.dynamic_sampling and (by_batch or algorithm.advantage_scale is AdvantageScale.batch_tokens)),
            f"algorithm.dynamic_sampling={algorithm.dynamic_sampling} replaces groups of equal rewards, which teach "
            "too when all completions of the step are compared: type algorithm.dynamic_sampling=0",
        ),
        least("algorithm.dynamic_sampling", algorithm.dynamic_sampling, 0),
        least("algorithm.kl.coefficient", kl.coefficient, 0),
        (
            not (kl.coefficient and kl.estimator is KLEstimator.k1 and not kl.unbiased),
            "algorithm.kl.estimator=k1: its gradient is 0 on average, it penalises nothing: type "
            "algorithm.kl.unbiased=true or algorithm.kl.estimator=k3",
        ),
        (
            not (kl.unbiased and kl.estimator is KLEstimator.k2),
            "algorithm.kl.unbiased=true: without it the gradient of k2 is already the gradient of KL: "
            "type algorithm.kl.unbiased=false or algorithm.kl.estimator=k3",
        ),
        least("algorithm.kl.refresh_every", kl.refresh_every, 0),
        (
            not (kl.coefficient and kl.refresh_every == 1 and kl.refresh_mix == 1 and algorithm.optimizer_steps == 1),
            "algorithm.kl.refresh_every=1: the reference would be the policy itself in each update: type more, or "
            "algorithm.kl.refresh_mix=0.5",
        ),
        (0 < kl.refresh_mix <= 1, f"algorithm.kl.refresh_mix={kl.refresh_mix}: must be above 0 and at most 1"),
        least("algorithm.entropy_coefficient", algorithm.entropy_coefficient, 0),
        (
            0 <= correction.floor <= 1 <= correction.cap and correction.floor < correction.cap,
            f"algorithm.correction.floor={correction.floor} algorithm.correction.cap={correction.cap}: "
            "must be from 0 to 1, and 1 or more, and differ: without a gap the ratio is 1",
        ),
        (
            correction.mode is not CorrectionMode.mask or 1 not in (correction.floor, correction.cap),
            f"algorithm.correction.floor={correction.floor} algorithm.correction.cap={correction.cap}: with "
            "algorithm.correction.mode=mask a bound of 1 masks by rounding",
        ),
        (drift is None or drift > 0, f"algorithm.off_policy_threshold={drift}: must be above 0, or null"),
        (
            cfg.rollout.top_p >= 1 or not (corrects or drift is not None),
            f"rollout.top_p={cfg.rollout.top_p}: the sampler's logprobs are of the tokens that it kept, and cannot be "
            "compared with the trainer's: type rollout.top_p=1, or algorithm.correction.level=none "
            "algorithm.off_policy_threshold=null",
        ),
        (
            0 <= overlong.buffer <= 1,
            f"algorithm.overlong.buffer={overlong.buffer}: a part of rollout.max_new_tokens, 0 to 1",
        ),
        (overlong.factor > 0, f"algorithm.overlong.factor={overlong.factor}: must be above 0"),
    ]


def idle(cfg: JobConf) -> list[str]:
    """Values without effect or without their companion, each with what to type. No mistakes: a sweep may want them."""
    if not isinstance(cfg, GRPOConf):
        return []
    algorithm, found = cfg.algorithm, []
    for name, switch, off, default in (
        ("kl", "coefficient", algorithm.kl.coefficient == 0, KLConf()),
        ("correction", "level", algorithm.correction.level is CorrectionLevel.none, CorrectionConf()),
        ("overlong", "buffer", algorithm.overlong.buffer == 0, OverlongConf()),
    ):
        chosen = dataclasses.asdict(getattr(algorithm, name))
        if off and (keys := [key for key, value in dataclasses.asdict(default).items() if chosen[key] != value]):
            options = " ".join(f"algorithm.{name}.{key}={chosen[key]}" for key in keys)
            found.append(f"{options} without effect: algorithm.{name}.{switch}={chosen[switch]}")
    if cfg.rollout.max_staleness and algorithm.correction.level is CorrectionLevel.none:
        found.append(
            f"rollout.max_staleness={cfg.rollout.max_staleness}: rollouts of older weights are trained on uncorrected. "
            "algorithm.correction.level=token corrects"
        )
    if algorithm.kl.coefficient and algorithm.kl.refresh_mix != 1 and not algorithm.kl.refresh_every:
        found.append(
            f"algorithm.kl.refresh_mix={algorithm.kl.refresh_mix} without effect: algorithm.kl.refresh_every=0"
        )
    if algorithm.optimizer_steps == 1:
        unused = [f"algorithm.ratio={algorithm.ratio}"] * (algorithm.ratio is Ratio.sequence_mean)
        unused += [f"algorithm.surrogate={algorithm.surrogate}"] * (algorithm.surrogate is Surrogate.sapo)
        unused += [f"algorithm.dual_clip={algorithm.dual_clip}"] * (algorithm.dual_clip is not None)
        if unused:
            found.append(
                f"{' '.join(unused)} without effect on gradients: with one optimizer step a rollout every ratio is 1. "
                "algorithm.mini_batches=4 or algorithm.updates_per_rollout=2 makes several"
            )
    return found


def least(key: str, value: float, least: int) -> tuple[bool, str]:
    """Does the rule hold, and what to say if not."""
    return value >= least, f"{key}={value}: must be {least} or more"
