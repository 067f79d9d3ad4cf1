"""Token logprobs and entropies of the policy that was sampled from: the softmax of logits / temperature."""

from __future__ import annotations

import torch

from posttrain.packing import PackedRow


def token_logprobs(model: torch.nn.Module, row: PackedRow, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of `row.targets_BK` with gradient, and the entropy of each position (nats) without; both fp32 [B, K].

    Only the positions that predict a completion token go through the LM head.
    """
    logits_BKV = model(**row.model_inputs()).logits.float() / temperature
    normalizer_BK = logits_BKV.logsumexp(-1)
    logprobs_BK = logits_BKV.gather(-1, row.targets_BK[..., None]).squeeze(-1) - normalizer_BK
    with torch.no_grad():
        entropy_BK = normalizer_BK - ((logits_BKV - normalizer_BK[..., None]).exp() * logits_BKV).sum(-1)
    return logprobs_BK, entropy_BK
