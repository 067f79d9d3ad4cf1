"""Sampling with the training model itself: prompts are prefilled once, their cache serves all samples of the group.

The randomness of a sample is a function of (seed, step, prompt, sample) alone. A run therefore draws the same
samples however its prompts are spread over ranks, and a resumed run needs no generator state.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from posttrain import preemption
from posttrain.config import RolloutConf
from posttrain.records import Problem, Rollout


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    problems: Sequence[tuple[int, Problem]],
    cfg: RolloutConf,
    *,
    key: tuple[int, ...],
    end_ids: Collection[int],
    pad_id: int,
    version: int = 0,
) -> list[Rollout]:
    """`cfg.group_size` completions of each (group, problem): in the order of `problems`, samples side by side.

    Args:
        cfg: temperature 0 is greedy; `batch_size` sequences are decoded together, or one group if that is more.
        key: with the group, seeds the sampling noise: (purpose, seed, step), of one length for all purposes, since
            trailing zeros do not count.
        end_ids: tokens that end a completion; the one that did is its last.
        version: of the weights, for the record.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    samples, at_once = cfg.group_size, max(1, cfg.batch_size // cfg.group_size)
    rollouts: list[Rollout] = []
    for first in range(0, len(problems), at_once):
        part = problems[first : first + at_once]
        noise = [np.random.default_rng([*key, group]).random((samples, cfg.max_new_tokens)) for group, _ in part]
        uniform = torch.from_numpy(np.concatenate(noise))
        sampled = _decode(model, [problem.prompt_ids for _, problem in part], uniform, cfg, end_ids, pad_id)
        which = [(group, problem, sample) for group, problem in part for sample in range(samples)]
        for (group, problem, sample), (ids, logprobs) in zip(which, sampled, strict=True):
            rollouts.append(
                Rollout.one_turn(
                    prompt_ids=problem.prompt_ids,
                    completion_ids=ids,
                    logprobs=logprobs,
                    finish_reason="stop" if ids[-1] in end_ids else "length",
                    group=group,
                    sample=sample,
                    version=version,
                )
            )
    # Gradient checkpointing keeps some modules in train mode, without the modules inside them.
    for module in training:
        module.training = True
    return rollouts


def _decode(
    model: PreTrainedModel,
    prompts: Sequence[tuple[int, ...]],
    uniform: torch.Tensor,
    cfg: RolloutConf,
    end_ids: Collection[int],
    pad_id: int,
) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """(completion ids, logprobs) of each sequence; `uniform` [S, max_new_tokens] decides. The finished leave the batch.

    Shape suffixes: P prompts, L their padded length, S sequences still being decoded.
    """
    device = model.device
    length = max(map(len, prompts))
    ids_PL = torch.tensor([[pad_id] * (length - len(p)) + list(p) for p in prompts], device=device)
    mask_PL = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts], device=device)
    positions_PL = (mask_PL.cumsum(1) - 1).clamp(min=0)
    out = model(input_ids=ids_PL, attention_mask=mask_PL, position_ids=positions_PL, use_cache=True, logits_to_keep=1)
    cache = out.past_key_values
    expand_S = torch.arange(len(prompts), device=device).repeat_interleave(cfg.group_size)
    cache.reorder_cache(expand_S)
    logits_SV, mask_SL = out.logits[expand_S, -1], mask_PL[expand_S]
    position_S1 = positions_PL[expand_S, -1:]
    uniform = uniform.to(device)
    end = torch.tensor(sorted(end_ids), device=device)

    # The sequence behind each row of the batch: rows leave as their sequences end.
    active = list(range(len(expand_S)))
    completions: list[tuple[list[int], list[float]]] = [([], []) for _ in active]
    for position in range(uniform.shape[1]):
        tokens_S, logprobs_S = sample(logits_SV, uniform[active, position], cfg.temperature, cfg.top_p)
        if not logprobs_S.isfinite().all():
            raise FloatingPointError("the sampler's logits are not finite: training diverged, or the weights are bad")
        for sequence, token, logprob in zip(active, tokens_S.tolist(), logprobs_S.tolist(), strict=True):
            completions[sequence][0].append(token)
            completions[sequence][1].append(logprob)
        keep = (~torch.isin(tokens_S, end)).nonzero().squeeze(1)
        if preemption.asked():
            # The step is given up, and sampled again.
            break
        if position + 1 == uniform.shape[1] or len(keep) == 0:
            break
        if len(keep) < len(active):
            active = [active[i] for i in keep.tolist()]
            cache.reorder_cache(keep)
            tokens_S, mask_SL, position_S1 = tokens_S[keep], mask_SL[keep], position_S1[keep]
        mask_SL = torch.cat([mask_SL, mask_SL.new_ones(len(active), 1)], dim=1)
        position_S1 = position_S1 + 1
        logits_SV = model(
            input_ids=tokens_S[:, None],
            attention_mask=mask_SL,
            position_ids=position_S1,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
    return [(tuple(ids), tuple(logprobs)) for ids, logprobs in completions]


def sample(
    logits_SV: torch.Tensor, uniform_S: torch.Tensor, temperature: float, top_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Invert the cumulative distribution at `uniform_S` in [0, 1): tokens [S] and their logprobs [S], fp32.

    The logprobs are of the distribution that was sampled from: after temperature and, where top_p < 1, among the
    kept tokens. Greedy (temperature 0) reports the logprobs at temperature 1.
    """
    logits_SV = logits_SV.float()
    if temperature == 0:
        tokens_S = logits_SV.argmax(-1)
        return tokens_S, logits_SV.log_softmax(-1).gather(1, tokens_S[:, None]).squeeze(1)
    logprobs_SV = (logits_SV / temperature).log_softmax(-1)
    if top_p < 1:
        ordered_SV, order_SV = logprobs_SV.sort(-1, descending=True)
        # A token is kept if the likelier ones together have less mass than top_p.
        before_SV = ordered_SV.exp().cumsum(-1) - ordered_SV.exp()
        kept_SV = torch.zeros_like(logprobs_SV, dtype=torch.bool).scatter(1, order_SV, before_SV < top_p)
        logprobs_SV = logprobs_SV.masked_fill(~kept_SV, float("-inf")).log_softmax(-1)
    cumulative_SV = logprobs_SV.double().exp().cumsum(-1)
    target_S1 = uniform_S.to(cumulative_SV)[:, None] * cumulative_SV[:, -1:]
    # From the right a token of mass 0 is never met; a uniform that rounds up to 1 stays inside the vocabulary.
    tokens_S = torch.searchsorted(cumulative_SV, target_S1, right=True).squeeze(1)
    tokens_S = tokens_S.clamp(max=logprobs_SV.shape[1] - 1)
    return tokens_S, logprobs_SV.gather(1, tokens_S[:, None]).squeeze(1)
