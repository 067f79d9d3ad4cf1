"""The mathematics of GRPO: advantages, the clipped surrogate, and exact normalisation. Pure functions on tensors.

Shape suffixes: P prompts of the step, G samples of a prompt, N = P * G documents, K tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from posttrain.config import AdvantageScale, Aggregation, LossConf


def advantages(rewards_PG: torch.Tensor, scale: AdvantageScale, eps: float = 1e-4) -> torch.Tensor:
    """Group-relative advantages [P, G]: (R - mean) / (std + eps), or R - mean without the scale (Dr.GRPO).

    The standard deviation has Bessel's correction (DeepSeekMath, eq. 3; eps as in TRL). NaN rewards could not be
    scored: they stay NaN and leave their group's mean and deviation alone. A group whose rewards are equal, or of
    which fewer than two could be scored, teaches nothing: 0.
    """
    valid_PG = ~rewards_PG.isnan()
    count_P1 = valid_PG.sum(1, keepdim=True)
    mean_P1 = rewards_PG.nanmean(1, keepdim=True)
    centred_PG = rewards_PG - mean_P1
    std_P1 = (centred_PG.square().nansum(1, keepdim=True) / (count_P1 - 1).clamp(min=1)).sqrt()
    if scale is AdvantageScale.group:
        centred_PG = centred_PG / (std_P1 + eps)
    # Rounding of the mean leaves equal rewards a tiny deviation, which the division would blow up: compare rewards.
    filled_PG = torch.where(valid_PG, rewards_PG, mean_P1)
    equal_P1 = (filled_PG.amax(1, keepdim=True) - filled_PG.amin(1, keepdim=True)) <= 1e-6
    return torch.where(valid_PG & equal_P1, torch.zeros_like(centred_PG), centred_PG)


def token_weights(lengths_N: Sequence[int], aggregation: Aggregation, max_new_tokens: int) -> list[float]:
    """Each document's weight of its completion tokens, such that the step's loss is sum over tokens of weight * loss.

    `lengths_N` are the completion lengths of the global batch, over all ranks and micro-batches: the loss is then
    normalised exactly, however they are split. A document of length 0 does not count and weighs 0.
    """
    tokens, documents = max(1, sum(lengths_N)), max(1, sum(length > 0 for length in lengths_N))
    weight = {
        Aggregation.token_mean: lambda length: 1 / tokens,  # DAPO
        Aggregation.seq_mean_token_mean: lambda length: 1 / (documents * length),  # the GRPO paper
        Aggregation.seq_mean_token_sum: lambda length: 1 / documents,
        Aggregation.seq_mean_token_sum_norm: lambda length: 1 / (documents * max_new_tokens),  # Dr.GRPO
    }[aggregation]
    return [weight(length) if length else 0.0 for length in lengths_N]


def clipped_surrogate(
    logprobs_K: torch.Tensor, old_logprobs_K: torch.Tensor, advantages_K: torch.Tensor, cfg: LossConf
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """PPO's loss of each token, -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), with r = exp(logp - old_logp).

    Returns the losses and where the clip acts: below (A < 0) and above (A > 0), boolean, all of the input's shape.
    The log-ratio is clamped to +-20 so that r cannot overflow.
    """
    ratio_K = (logprobs_K - old_logprobs_K).clamp(-20, 20).exp()
    clipped_K = ratio_K.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    losses_K = -torch.min(ratio_K * advantages_K, clipped_K * advantages_K)
    low_K = (ratio_K < 1 - cfg.clip_low) & (advantages_K < 0)
    high_K = (ratio_K > 1 + cfg.clip_high) & (advantages_K > 0)
    return losses_K, low_K, high_K
