"""The algorithm group: independent switches, each with its default and meaning. The defaults together are GRPO.

GRPO is as in the paper (DeepSeekMath, arXiv:2402.03300), without its KL penalty (there 0.04). The published variants
are files of conf/algorithm/, and each file states only what it changes here:

    algorithm=grpo          nothing
    algorithm=dr_grpo       advantage_scale, aggregation                        arXiv:2503.20783
    algorithm=dapo          clip_high, aggregation, overlong, dynamic_sampling  arXiv:2503.14476
    algorithm=gspo          ratio, and bounds to match                          arXiv:2507.18071
    algorithm=cispo         surrogate, its bounds, aggregation                  arXiv:2506.13585
    algorithm=sapo          surrogate, its steepness                            arXiv:2511.20347
    algorithm=rloo          advantage_baseline, advantage_scale, ratio          arXiv:2402.14740
    algorithm=reinforce_pp  advantage_scale, aggregation                        arXiv:2501.03262

docs/algorithms.md has the equations, algorithm_rules.py says which combinations make no sense.
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
    batch_tokens = "batch_tokens"  # whitened over all trained tokens of the step (REINFORCE++)
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
    """The penalty on the distance to the model that the run started from, the reference."""

    coefficient: float = 0.0  # weight of the penalty, the paper's is 0.04; 0: none, and no reference in memory
    estimator: KLEstimator = KLEstimator.k3  # how the distance is estimated from a token's two logprobs
    unbiased: bool = False  # times the ratio, which makes the gradient the KL divergence's own; for k1 and k3
    reference: ReferenceDevice = ReferenceDevice.sharded  # where its weights lie while they are not in use
    refresh_every: int = 0  # steps after which the reference moves to the policy; 0: never
    refresh_mix: float = 1.0  # how far it moves; 1: all the way


@dataclass
class CorrectionConf:
    """The ratio of trainer to sampler weighs the loss of a token."""

    level: CorrectionLevel = CorrectionLevel.none  # over what that ratio is taken; none: no weight
    mode: CorrectionMode = CorrectionMode.truncate  # what becomes of a ratio outside [floor, cap]
    cap: float = 2.0  # the upper bound of the ratio, 1 or more
    floor: float = 0.0  # the lower bound of the ratio, from 0 to 1


@dataclass
class OverlongConf:
    """DAPO's penalty on the reward of long completions."""

    buffer: float = 0.0  # the last part of rollout.max_new_tokens, 0 to 1, in which the penalty grows; 0: no penalty
    factor: float = 1.0  # what the penalty grows to


@dataclass
class AlgorithmConf:
    # The comparison: how a completion's reward becomes its advantage.
    advantage_baseline: Baseline = Baseline.group  # what is subtracted from a completion's reward
    advantage_scale: AdvantageScale = AdvantageScale.group  # what the difference is divided by
    overlong: OverlongConf = field(default_factory=OverlongConf)
    mask_truncated: bool = False  # completions that reached rollout.max_new_tokens do not count
    dynamic_sampling: int = 0  # at most so many further draws of prompts to replace groups of equal rewards (DAPO)

    # The loss of a token.
    surrogate: Surrogate = Surrogate.clip  # what is made of ratio and advantage
    ratio: Ratio = Ratio.token  # over what the probability ratio of new to old policy is taken
    clip_low: float | None = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]; null: no bound on that side
    clip_high: float | None = 0.2  # the same, of the upper side
    dual_clip: float | None = None  # the most a ratio counts where the advantage is negative, e.g. 3; null: no limit
    sapo_tau_positive: float | None = None  # steepness of sapo's gate where the advantage is positive
    sapo_tau_negative: float | None = None  # the same where it is negative
    kl: KLConf = field(default_factory=KLConf)
    entropy_coefficient: float = 0.0  # weight of the entropy bonus; 0: none

    # The sum of token losses.
    aggregation: Aggregation = Aggregation.seq_mean_token_mean  # how token losses become one number

    # The gap between the policy that sampled and the policy that is trained.
    correction: CorrectionConf = field(default_factory=CorrectionConf)
    off_policy_threshold: float | None = None  # mean drift, e.g. 0.1, that masks completions of negative advantage

    # Optimizer steps on the same rollouts. Ratios leave 1 from the second one on.
    updates_per_rollout: int = 1  # passes over the same rollouts
    mini_batches: int = 1  # optimizer steps of a pass, each on its share of the prompts

    @property
    def optimizer_steps(self) -> int:
        """On the same rollouts."""
        return self.updates_per_rollout * self.mini_batches

    @property
    def every_token_counts(self) -> bool:
        """Also those of completions whose advantage is 0, which have no other gradient."""
        return self.kl.coefficient != 0 or self.entropy_coefficient != 0
