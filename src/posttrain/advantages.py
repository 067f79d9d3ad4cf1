"""From rewards to advantages and weights, on the host: small tensors and Python numbers.

Shape suffixes: P prompts of the step, G samples of a prompt, C = P * G completions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from posttrain.config.algorithm import AdvantageScale, Aggregation, AlgorithmConf, Baseline, OverlongConf

# Rewards that differ by no more than this are equal: the rounding of a sum of rewards is no signal.
EQUAL = 1e-6


def advantages(
    rewards_PG: torch.Tensor, lengths_PG: torch.Tensor, cfg: AlgorithmConf, eps: float = 1e-4
) -> torch.Tensor:
    """How much better each completion is than expected [P, G]: (R - baseline) / scale, in the rewards' dtype.

    `cfg.advantage_baseline`:
        group           the mean of its group (DeepSeekMath, eq. 3)
        leave_one_out   the mean of the others of its group: n / (n - 1) (R - mean) (RLOO, arXiv:2402.14740)
        batch           the mean of the step
    `cfg.advantage_scale`, of raw rewards, with Bessel's correction and `eps` added (TRL's 1e-4; verl has 1e-6):
        group, batch    the standard deviation of the group, of the step (TRL's scale_rewards)
        none            1 (Dr.GRPO)
        batch_tokens    whitened over the trained tokens of the step, as many of each as `lengths_PG` says:
                        (A - mean) / sqrt(variance + 1e-8), variance with Bessel's correction (verl's masked_whiten).
                        Takes away the mean over tokens too; a baseline of batch is then none at all (REINFORCE++)

    Rewards that are NaN could not be scored: they stay NaN and are in no statistic. Where there is nothing to compare,
    because the rewards that are compared are equal or fewer than two, R - baseline is exactly 0: of a group for group
    and leave_one_out, of the step for batch. So is its advantage, unless whitening shifts it.
    """
    rewards = rewards_PG.double()
    compared = rewards.reshape(1, -1) if cfg.advantage_baseline is Baseline.batch else rewards
    count = (~compared.isnan()).sum(1, keepdim=True)
    centred = compared - compared.nanmean(1, keepdim=True)
    if cfg.advantage_baseline is Baseline.leave_one_out:
        centred = centred * count / (count - 1).clamp(min=1)
    # Rounding of the mean leaves equal rewards a tiny difference, which a division by their deviation would blow up.
    centred = torch.where(informative(compared)[:, None] | compared.isnan(), centred, 0.0).view_as(rewards)
    match cfg.advantage_scale:
        case AdvantageScale.group:
            scaled = centred / (_deviation(rewards) + eps)
        case AdvantageScale.batch:
            scaled = centred / (_deviation(rewards.reshape(1, -1)) + eps)
        case AdvantageScale.batch_tokens:
            scaled = _whitened(centred, lengths_PG)
        case AdvantageScale.none:
            scaled = centred
    return scaled.to(rewards_PG.dtype)


def informative(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Which groups have rewards that differ [P]; without two that could be scored there is no difference."""
    unscored_PG = rewards_PG.isnan()
    most_P = rewards_PG.masked_fill(unscored_PG, -torch.inf).amax(1)
    least_P = rewards_PG.masked_fill(unscored_PG, torch.inf).amin(1)
    return most_P - least_P > EQUAL


def most_informative(rewards_PG: torch.Tensor, count: int) -> list[int]:
    """The places of `count` groups, ascending: those whose rewards differ, then the first of the others."""
    order_P = torch.argsort(~informative(rewards_PG), stable=True)
    return order_P[:count].sort().values.tolist()


def overlong_penalty(lengths: torch.Tensor, max_new_tokens: int, cfg: OverlongConf) -> torch.Tensor:
    """What is added to the rewards of completions of these lengths, 0 or less, of the same shape (DAPO, eq. 13).

    0 up to a length of max_new_tokens - buffer, then falling linearly to -factor at max_new_tokens, with a buffer of
    `cfg.buffer * max_new_tokens` tokens. Without a buffer there is no penalty.
    """
    if not cfg.buffer:
        return torch.zeros_like(lengths, dtype=torch.float32)
    buffer = cfg.buffer * max_new_tokens
    excess = (lengths.double() - (max_new_tokens - buffer)) / buffer
    return (-cfg.factor * excess.clamp(0, 1)).float()


def token_weights(lengths_C: Sequence[int], aggregation: Aggregation, max_new_tokens: int) -> list[float]:
    """Each document's weight of its trained tokens, such that the step's loss is sum over tokens of weight * loss.

    `lengths_C` are the completion lengths of the global batch, over all ranks and micro-batches: the loss is then
    normalised exactly, however they are split. A document of length 0 does not count and weighs 0.
    """
    tokens, documents = max(1, sum(lengths_C)), max(1, sum(length > 0 for length in lengths_C))
    weight = {
        Aggregation.token_mean: lambda length: 1 / tokens,  # DAPO
        Aggregation.seq_mean_token_mean: lambda length: 1 / (documents * length),  # the GRPO paper
        Aggregation.seq_mean_token_sum: lambda length: 1 / documents,
        Aggregation.seq_mean_token_sum_norm: lambda length: 1 / (documents * max_new_tokens),  # Dr.GRPO
    }[aggregation]
    return [weight(length) if length else 0.0 for length in lengths_C]


def _deviation(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Of each row [P, 1], without its NaN, with Bessel's correction."""
    count_P1 = (~rewards_PG.isnan()).sum(1, keepdim=True)
    squares_PG = (rewards_PG - rewards_PG.nanmean(1, keepdim=True)).square()
    return (squares_PG.nansum(1, keepdim=True) / (count_P1 - 1).clamp(min=1)).sqrt()


def _whitened(values_PG: torch.Tensor, lengths_PG: torch.Tensor) -> torch.Tensor:
    """Mean 0 and variance 1 over tokens; each completion has as many tokens as `lengths_PG` says."""
    tokens_PG = lengths_PG.double().masked_fill(values_PG.isnan(), 0.0)
    tokens = tokens_PG.sum()
    mean = (tokens_PG * values_PG).nansum() / tokens.clamp(min=1)
    variance = (tokens_PG * (values_PG - mean).square()).nansum() / (tokens - 1).clamp(min=1)
    return (values_PG - mean) * (variance + 1e-8).rsqrt()
