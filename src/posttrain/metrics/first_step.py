"""What is suspicious by itself in the metrics of a run's first step, each with its likely cause.

Hours later the same values say so little: a run whose completions are all cut off, or whose sampler is of another
model, logs a smooth curve of nothing. No value here needs another run to be compared with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from posttrain.config import GRPOConf, PackingMode, TrainingConf
from posttrain.errors import UserError
from posttrain.training.policy import Policy

# The mean |logprob of the trainer - logprob of the sampler| that two right implementations stay under. In fp32 it is
# 1e-5, and 1e-3 where a GPU multiplies with TF32; in bf16 0.006 to 0.06. Broken ones were 0.17 to 1.5.
GAP = {torch.float64: 1e-6, torch.float32: 5e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
NO_ENTROPY, FULL_ENTROPY = 0.01, 0.95  # nats a token, and a part of log V
FILL, IMBALANCE = 0.9, 1.2


def look_at_first_step(metrics: Mapping[str, float], policy: Policy, cfg: TrainingConf) -> list[str]:
    """A line for each suspicious value; all ranks see the same ones.

    Raises UserError where no completion at all could be scored: more steps would train on nothing.
    """
    if metrics.get("frac_reward_unscorable") == 1:
        raise UserError(
            f"task={cfg.task.name}: no completion of the first step could be scored. The answers do not fit the "
            "reward: look at task.answer_column, and type task.answer_reward=exact for answers in words"
        )
    ends = repr(policy.tokenizer.convert_ids_to_tokens(sorted(policy.end_ids)))
    return suspicious(metrics, cfg, policy.vocabulary, policy.dtype, ends)


def suspicious(
    metrics: Mapping[str, float], cfg: TrainingConf, vocabulary: int, dtype: torch.dtype, ends: str
) -> list[str]:
    """One line for each suspicious value among `metrics`, the record of the first step.

    `vocabulary` is its size V, `dtype` the dtype of the computation, `ends` names the tokens that end a completion.
    """
    found = _of_samples(metrics, cfg, ends) + _of_tokens(metrics, cfg, vocabulary, dtype)
    if "grad_norm" not in metrics:
        found.append(
            "the first update was skipped, for its loss or gradient: look for weights or logits that are too large"
        )
    elif metrics["grad_norm"] == 0 and not _all_equal(metrics):
        found.append("grad_norm is 0: no parameter can be trained, or every token's weight in the loss is 0")
    if (fill := metrics.get("packing/fill", 1.0)) < FILL:
        cause = f"packing.pad_multiple={cfg.packing.pad_multiple}, or packing.tokens_per_row is short for the documents"
        if cfg.packing.mode is PackingMode.padded:
            cause = "packing=padded computes padding; packing=thd does not"
        found.append(f"packing/fill is {fill:.2f}: the rest of what is computed is padding ({cause})")
    if (imbalance := metrics.get("packing/rank_imbalance", 1.0)) > IMBALANCE:
        found.append(
            f"packing/rank_imbalance is {imbalance:.2f}: ranks wait for the busiest one, for lack of documents or for "
            "one that is far longer than the others; more prompts a step, or fewer ranks, even it out"
        )
    return found


def _all_equal(metrics: Mapping[str, float]) -> bool:
    return metrics.get("frac_reward_zero_std") == 1


def _of_samples(metrics: Mapping[str, float], cfg: TrainingConf, ends: str) -> list[str]:
    found = []
    if metrics.get("completions/clipped_ratio") == 1:
        found.append(
            f"every completion was cut off at rollout.max_new_tokens={cfg.rollout.max_new_tokens}: raise it, or the "
            f"model ends its turn with a token that is not among {ends}"
        )
    if _all_equal(metrics):
        reward = metrics.get("reward", math.nan)
        cause = "the prompts are too easy, or the reward accepts anything"
        if reward <= cfg.task.reward_format:
            cause = "the prompts are too hard, the answers are written another way, or completions are cut off"
        found.append(f"the rewards of each group are all equal ({reward:.3g}), nothing can be learned: {cause}")
    return found


def _of_tokens(metrics: Mapping[str, float], cfg: TrainingConf, vocabulary: int, dtype: torch.dtype) -> list[str]:
    found = []
    # With several optimizer steps, or tokens without a gradient, the step may have the mean of some tokens only.
    gap, entropy = (
        metrics.get(name, metrics.get(f"trained/{name}")) for name in ("sampling/logp_difference/mean", "entropy")
    )
    on_policy = isinstance(cfg, GRPOConf) and not cfg.rollout.max_staleness
    if gap is not None and on_policy and gap > GAP[dtype]:
        found.append(
            f"sampling/logp_difference/mean is {gap:.2g} nats, above {GAP[dtype]:g}: sampler and trainer do not "
            "compute the same distribution, so ratios are wrong from the first step on"
        )
    if entropy is not None and entropy < NO_ENTROPY:
        found.append(
            f"entropy is {entropy:.2g} nats a token: the model hardly ever varies, so a group's completions are alike; "
            "a higher rollout.temperature, or weights that are trained less, vary more"
        )
    if entropy is not None and entropy > FULL_ENTROPY * math.log(vocabulary):
        found.append(
            f"entropy is {entropy:.3g} nats a token, near log({vocabulary}) = {math.log(vocabulary):.3g}: the model "
            "guesses; its weights are random, or were not loaded as they were saved"
        )
    return found
