"""The loss of each token: surrogate, KL penalty, entropy bonus, and the corrections for data of another policy.

Every function is pure, and takes what it needs from one micro-batch. docs/algorithms.md has the equations together.

Shape suffixes: B rows of a micro-batch, K tokens of it that are predicted, C its completions, one a document.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from posttrain.config.algorithm import (
    AlgorithmConf,
    CorrectionConf,
    CorrectionLevel,
    CorrectionMode,
    KLEstimator,
    Ratio,
    Surrogate,
)
from posttrain.records import PackedRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What one micro-batch adds to the loss, per token and unweighted. Where nothing is trained on, losses are 0."""

    loss_BK: torch.Tensor  # with gradient
    policy_BK: torch.Tensor  # the part of it that is not penalty or bonus
    old_logprobs_BK: torch.Tensor  # of the policy that the ratio compares with
    means: dict[str, torch.Tensor]  # by metric, [B, K]: its mean over trained tokens is the metric


def policy_terms(logprobs_BK: torch.Tensor, entropy_BK: torch.Tensor, row: PackedRow, cfg: AlgorithmConf) -> Terms:
    """policy + kl.coefficient * kl - entropy_coefficient * entropy of each token, all in nats.

    The policy term is the surrogate, times the correction's weight, or 0 where the off-policy mask applies: as in TRL
    and verl neither touches penalty and bonus, and what is masked still counts in the normalisation. Without old
    logprobs in `row` they are `logprobs_BK` themselves: the ratio is exactly 1, and its gradient is the logprob's.

    The metrics clip_ratio/low_mean and high_mean count tokens whose gradient the clip takes away; under cispo those
    whose weight it bounds, whatever the advantage's sign; sapo has none. A completion's ratio counts on each of its
    tokens. Finite inputs give finite losses and gradients, whatever stands at positions of weight 0.
    Raises ValueError where the penalty has no reference, or the bonus no gradient.
    """
    if cfg.kl.coefficient and row.reference_logprobs_BK is None:
        raise ValueError("a KL penalty needs the reference's logprobs")
    if cfg.entropy_coefficient and logprobs_BK.requires_grad and not entropy_BK.requires_grad:
        raise ValueError("an entropy bonus needs the entropy's gradient")
    trained_BK = row.weights_BK > 0
    # Where nothing is trained on, values may be anything, also NaN. NaN * 0 is NaN, so they are replaced first.
    logprobs_BK, entropy_BK = logprobs_BK.where(trained_BK, 0.0), entropy_BK.where(trained_BK, 0.0)
    old_BK = logprobs_BK if row.old_logprobs_BK is None else row.old_logprobs_BK.where(trained_BK, 0.0)
    old_BK = old_BK.detach()
    sampled_BK = row.sampled_logprobs_BK.where(trained_BK, 0.0)
    advantages_BK = row.advantages_BK.where(trained_BK, 0.0)
    means = {"entropy": entropy_BK.detach()}

    ratio_BK = bounded_exp(over_completions(logprobs_BK - old_BK, cfg.ratio, row))
    match cfg.surrogate:
        case Surrogate.clip:
            policy_BK, low_BK, high_BK = clip(ratio_BK, advantages_BK, cfg)
        case Surrogate.cispo:
            policy_BK, low_BK, high_BK = cispo(ratio_BK, logprobs_BK, advantages_BK, cfg)
        case Surrogate.sapo:
            policy_BK = sapo(ratio_BK, advantages_BK, cfg)
    if cfg.surrogate is not Surrogate.sapo:
        means |= {"clip_ratio/low_mean": low_BK.float(), "clip_ratio/high_mean": high_BK.float()}
    if cfg.correction.level is not CorrectionLevel.none:
        correction_BK, outside_BK = correction(old_BK, sampled_BK, cfg.correction, row)
        policy_BK = policy_BK * correction_BK
        means |= {"correction/weight": correction_BK, "correction/outside": outside_BK.float()}
    if cfg.off_policy_threshold is not None:
        masked_BK = off_policy(logprobs_BK, sampled_BK, advantages_BK, cfg.off_policy_threshold, row)
        policy_BK = policy_BK.where(~masked_BK, 0.0)
        means["off_policy_masked"] = masked_BK.float()

    # Penalty and bonus are added to every counted token, also where the policy term is masked.
    loss_BK = policy_BK
    if row.reference_logprobs_BK is not None:
        kl_BK = kl(logprobs_BK, row.reference_logprobs_BK.where(trained_BK, 0.0), cfg.kl.estimator)
        if cfg.kl.unbiased:
            kl_BK = kl_BK * bounded_exp(logprobs_BK - old_BK)
        loss_BK = loss_BK + cfg.kl.coefficient * kl_BK
        means["kl"] = kl_BK.detach()
    if cfg.entropy_coefficient:
        loss_BK = loss_BK - cfg.entropy_coefficient * entropy_BK
    return Terms(loss_BK=loss_BK, policy_BK=policy_BK.detach(), old_logprobs_BK=old_BK, means=means)


def bounded_exp(log_ratio_BK: torch.Tensor) -> torch.Tensor:
    """The ratio, its logarithm clamped to +-20 as in verl. Beyond that it is constant: it has no gradient."""
    return log_ratio_BK.clamp(-20, 20).exp()


def over_completions(log_ratio_BK: torch.Tensor, level: Ratio, row: PackedRow) -> torch.Tensor:
    """Token log-ratios as they are, or their mean or sum over a completion's trained tokens, on each of these [B, K].

    Mean: GSPO (arXiv:2507.18071). Sum: the log-ratio of whole completions (RLOO). The gradient goes through all tokens.
    Weights are equal within a completion, so the gradient summed over it equals GSPO's token variant, with the ratio
    sg(s) pi / sg(pi) (verl's compute_policy_loss_gspo).
    """
    if level is Ratio.token:
        return log_ratio_BK
    trained_BK = row.weights_BK > 0
    document_BK = row.document_BK.where(trained_BK, 0)
    values_C = _sum_by_document(log_ratio_BK.where(trained_BK, 0.0), document_BK, row.documents)
    if level is Ratio.sequence_mean:
        values_C = values_C / _sum_by_document(trained_BK.to(values_C.dtype), document_BK, row.documents).clamp(min=1)
    return values_C[document_BK].where(trained_BK, 0.0)


def clip(
    ratio_BK: torch.Tensor, advantages_BK: torch.Tensor, cfg: AlgorithmConf
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """PPO's loss -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and where the clip acts: below, above (boolean).

    With `dual_clip` c the loss of a negative advantage is at most -c A (arXiv:1912.09729, verl). For c above
    1 + clip_high TRL's delta, which bounds r in the first term, is the same.
    """
    low, high = _bounds(cfg)
    loss_BK = -torch.min(ratio_BK * advantages_BK, ratio_BK.clamp(low, high) * advantages_BK)
    if cfg.dual_clip is not None:
        loss_BK = torch.where(advantages_BK < 0, torch.min(-cfg.dual_clip * advantages_BK, loss_BK), loss_BK)
    return loss_BK, (ratio_BK < low) & (advantages_BK < 0), (ratio_BK > high) & (advantages_BK > 0)


def cispo(
    ratio_BK: torch.Tensor, logprobs_BK: torch.Tensor, advantages_BK: torch.Tensor, cfg: AlgorithmConf
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """CISPO's loss -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logp, and where the weight is bounded (boolean).

    arXiv:2506.13585, as verl's compute_policy_loss_cispo. TRL's epsilon_high is 1 + clip_high, its clip_low null.
    """
    low, high = _bounds(cfg)
    ratio_BK, acts_BK = ratio_BK.detach(), advantages_BK != 0
    loss_BK = -ratio_BK.clamp(low, high) * advantages_BK * logprobs_BK
    return loss_BK, (ratio_BK < low) & acts_BK, (ratio_BK > high) & acts_BK


def sapo(ratio_BK: torch.Tensor, advantages_BK: torch.Tensor, cfg: AlgorithmConf) -> torch.Tensor:
    """SAPO's loss -A sigmoid(tau (r - 1)) 4 / tau, with tau by the sign of A (arXiv:2511.20347)."""
    if cfg.sapo_tau_positive is None or cfg.sapo_tau_negative is None:
        raise ValueError("sapo needs a tau for positive and one for negative advantages")
    positive_BK = torch.full_like(ratio_BK, cfg.sapo_tau_positive)
    tau_BK = positive_BK.where(advantages_BK > 0, cfg.sapo_tau_negative)
    return -advantages_BK * (tau_BK * (ratio_BK - 1)).sigmoid() * 4 / tau_BK


def correction(
    old_BK: torch.Tensor, sampled_BK: torch.Tensor, cfg: CorrectionConf, row: PackedRow
) -> tuple[torch.Tensor, torch.Tensor]:
    """Constant weights rho = pi_old / pi_sampler against the gap between trainer and sampler, and where it is outside.

    Outside [floor, cap] rho becomes the bound (truncate: TIS) or 0 (mask: MIS, IcePop).
    """
    rho_BK = bounded_exp(over_completions(old_BK - sampled_BK, Ratio(cfg.level), row))
    outside_BK = (rho_BK < cfg.floor) | (rho_BK > cfg.cap)
    inside_BK = rho_BK.where(~outside_BK, 0.0) if cfg.mode is CorrectionMode.mask else rho_BK.clamp(cfg.floor, cfg.cap)
    return inside_BK, outside_BK


def off_policy(
    logprobs_BK: torch.Tensor, sampled_BK: torch.Tensor, advantages_BK: torch.Tensor, threshold: float, row: PackedRow
) -> torch.Tensor:
    """Tokens of completions of negative advantage from which the policy has drifted (DeepSeek-V3.2, arXiv:2512.02556).

    Boolean. Drift is the mean over a completion's tokens of the sampler's minus the policy's logprob.
    """
    drift_BK = over_completions(sampled_BK - logprobs_BK.detach(), Ratio.sequence_mean, row)
    return (advantages_BK < 0) & (drift_BK > threshold)


def kl(logprobs_BK: torch.Tensor, reference_BK: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """KL(policy || reference) estimated from each sampled token, Schulman's k1, k2 and k3.

    With d = reference - logp: k1 = -d; k2 = d^2 / 2; k3 = exp(d) - d - 1, with d at most 20. verl also bounds d below
    by -20 and k3 by 10, where the gradient ends.
    """
    d_BK = reference_BK - logprobs_BK
    match estimator:
        case KLEstimator.k1:
            return -d_BK
        case KLEstimator.k2:
            return d_BK.square() / 2
        case KLEstimator.k3:
            d_BK = d_BK.clamp(max=20)
            return torch.expm1(d_BK) - d_BK


def _bounds(cfg: AlgorithmConf) -> tuple[float, float]:
    """Of the ratio; null is no bound on that side."""
    return (
        0.0 if cfg.clip_low is None else 1 - cfg.clip_low,
        torch.inf if cfg.clip_high is None else 1 + cfg.clip_high,
    )


def _sum_by_document(values_BK: torch.Tensor, document_BK: torch.Tensor, documents: int) -> torch.Tensor:
    return values_BK.new_zeros(documents).index_add(0, document_BK.flatten(), values_BK.flatten())
