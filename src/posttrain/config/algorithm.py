"""The schema of the algorithm group: independent switches, of which conf/algorithm/ has the published combinations.

docs/algorithms.md has their equations. algorithm_rules.py says which combinations make no sense.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Baseline(StrEnum):
    """What is subtracted from a completion's reward."""

    group = "group"  # the mean of its group
    leave_one_out = "leave_one_out"  # the mean of the others of its group (RLOO)
    batch = "batch"  # the mean of all completions of the step (REINFORCE++)


class AdvantageScale(StrEnum):
    """What the difference is divided by."""

    group = "group"  # the standard deviation of its group (GRPO)
    batch = "batch"  # the standard deviation of all rewards of the step
    batch_tokens = "batch_tokens"  # whitened over all completion tokens of the step (REINFORCE++)
    none = "none"  # Dr.GRPO


class Ratio(StrEnum):
    """Over what the probability ratio of new to old policy is taken."""

    token = "token"
    sequence_mean = "sequence_mean"  # geometric mean of a completion's token ratios (GSPO)
    sequence_sum = "sequence_sum"  # their product: the ratio of whole completions (RLOO)


class Surrogate(StrEnum):
    """What is made of ratio and advantage."""

    clip = "clip"  # PPO's pessimistic minimum of clipped and unclipped
    cispo = "cispo"  # the clipped ratio as a constant weight of the logprob
    sapo = "sapo"  # a sigmoid gate in place of the clip


class Aggregation(StrEnum):
    """How token losses become one number, over the whole optimizer step."""

    token_mean = "token_mean"  # DAPO
    seq_mean_token_mean = "seq_mean_token_mean"  # the GRPO paper
    seq_mean_token_sum = "seq_mean_token_sum"
    seq_mean_token_sum_norm = "seq_mean_token_sum_norm"  # Dr.GRPO


KLEstimator = StrEnum("KLEstimator", "k1 k2 k3")


class ReferenceDevice(StrEnum):
    """Where the reference's weights lie while they are not in use."""

    sharded = "sharded"  # where the policy's lie, sharded in the same way
    cpu = "cpu"


class CorrectionLevel(StrEnum):
    """Over what the ratio of trainer to sampler is taken."""

    none = "none"
    token = "token"
    sequence_mean = "sequence_mean"  # geometric mean of a completion's token ratios
    sequence_sum = "sequence_sum"  # their product


class CorrectionMode(StrEnum):
    """What becomes of a ratio outside [floor, cap]."""

    truncate = "truncate"  # it counts as the bound (TIS)
    mask = "mask"  # it counts as 0 (MIS, IcePop)


@dataclass
class KLConf:
    coefficient: float = 0.0  # 0: no penalty, and no reference model
    estimator: KLEstimator = KLEstimator.k3
    unbiased: bool = False  # times the ratio, which makes the gradient that of the KL divergence; k1 and k3
    reference: ReferenceDevice = ReferenceDevice.sharded
    refresh_every: int = 0  # steps after which the reference moves to the policy; 0: never
    refresh_mix: float = 1.0  # how far it moves: 1 all the way


@dataclass
class CorrectionConf:
    level: CorrectionLevel = CorrectionLevel.none
    mode: CorrectionMode = CorrectionMode.truncate
    cap: float = 2.0
    floor: float = 0.0


@dataclass
class OverlongConf:
    buffer: float = 0.0  # the last part of rollout.max_new_tokens in which the penalty grows; 0: no penalty
    factor: float = 1.0  # what it grows to


@dataclass
class AlgorithmConf:
    surrogate: Surrogate = Surrogate.clip
    ratio: Ratio = Ratio.token
    clip_low: float | None = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float | None = 0.2
    dual_clip: float | None = None  # the most that a ratio counts where the advantage is negative
    sapo_tau_positive: float | None = None  # steepness of the gate for positive advantages
    sapo_tau_negative: float | None = None
    advantage_baseline: Baseline = Baseline.group
    advantage_scale: AdvantageScale = AdvantageScale.group
    aggregation: Aggregation = Aggregation.seq_mean_token_mean
    kl: KLConf = field(default_factory=KLConf)
    entropy_coefficient: float = 0.0  # of the entropy bonus
    correction: CorrectionConf = field(default_factory=CorrectionConf)
    off_policy_threshold: float | None = None  # completions of negative advantage are masked from this mean drift on
    mask_truncated: bool = False  # completions that reached rollout.max_new_tokens do not count
    overlong: OverlongConf = field(default_factory=OverlongConf)
    dynamic_sampling: int = 0  # at most so many further draws to replace groups of equal rewards
    updates_per_rollout: int = 1  # passes over the same rollouts
    mini_batches: int = 1  # optimizer steps of one pass, each on its share of the groups

    @property
    def optimizer_steps(self) -> int:
        """On the same rollouts."""
        return self.updates_per_rollout * self.mini_batches

    @property
    def every_token_counts(self) -> bool:
        """Also those of completions whose advantage is 0, which have no other gradient."""
        return self.kl.coefficient != 0 or self.entropy_coefficient != 0
