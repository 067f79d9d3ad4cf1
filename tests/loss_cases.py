"""Token losses that follow the papers' equations one token at a time, in fp64, and what they are tried on.

The loop decides by the sign of the advantage where the code takes minima, and computes ratios of plain numbers.
"""

import math
from types import SimpleNamespace

import torch

from posttrain.config.algorithm import (
    AlgorithmConf,
    CorrectionConf,
    CorrectionLevel,
    CorrectionMode,
    KLConf,
    KLEstimator,
    Ratio,
    Surrogate,
)
from posttrain.losses import policy_terms

SAPO = dict(surrogate=Surrogate.sapo, sapo_tau_positive=1.0, sapo_tau_negative=1.05)
CISPO = dict(surrogate=Surrogate.cispo, clip_low=None, clip_high=4.0)
GSPO = dict(ratio=Ratio.sequence_mean, clip_low=3e-4, clip_high=4e-4)


def correct(level, mode, cap=1.3, floor=0.8):
    return CorrectionConf(level=CorrectionLevel(level), mode=CorrectionMode(mode), cap=cap, floor=floor)


VARIANTS = {
    # The published ones; dr_grpo and reinforce_pp are grpo here, they differ in advantages and weights.
    "grpo": {},
    "dapo": dict(clip_high=0.28),
    "gspo": GSPO,
    "cispo": CISPO,
    "sapo": SAPO,
    "rloo": dict(ratio=Ratio.sequence_sum),
    # Switches of each.
    "dual clip": dict(dual_clip=1.4),
    "no lower clip": dict(clip_low=None),
    "no upper clip": dict(clip_high=None),
    "cispo within two bounds": dict(surrogate=Surrogate.cispo),
    "sapo over sequences": dict(SAPO, ratio=Ratio.sequence_mean),
    "cispo over sequences": dict(surrogate=Surrogate.cispo, ratio=Ratio.sequence_sum),
    "k1": dict(kl=KLConf(coefficient=0.3, estimator=KLEstimator.k1)),
    "k2": dict(kl=KLConf(coefficient=0.3, estimator=KLEstimator.k2)),
    "k3": dict(kl=KLConf(coefficient=0.3, estimator=KLEstimator.k3)),
    "k1 unbiased": dict(kl=KLConf(coefficient=0.3, estimator=KLEstimator.k1, unbiased=True)),
    "k3 unbiased": dict(kl=KLConf(coefficient=0.3, estimator=KLEstimator.k3, unbiased=True)),
    "k3 unbiased, gspo": dict(GSPO, kl=KLConf(coefficient=0.3, unbiased=True)),
    "entropy": dict(entropy_coefficient=0.1),
    "truncate tokens": dict(correction=correct("token", "truncate")),
    "mask tokens": dict(correction=correct("token", "mask")),
    "truncate means": dict(correction=correct("sequence_mean", "truncate", 1.02, 0.98)),
    "mask means": dict(correction=correct("sequence_mean", "mask", 1.02, 0.98)),
    "truncate products": dict(correction=correct("sequence_sum", "truncate")),
    "mask products": dict(correction=correct("sequence_sum", "mask")),
    "off-policy mask": dict(off_policy_threshold=0.02),
    "all": dict(
        GSPO,
        kl=KLConf(coefficient=0.3),
        entropy_coefficient=0.1,
        correction=correct("token", "mask"),
        off_policy_threshold=0.02,
    ),
}
LENGTHS = [1, 50, 7, 50, 1, 7, 50, 50]
ADVANTAGES = [1.5, -0.7, 0.9, 1.1, -1.2, -0.4, -0.3, 0.0]


def documents(lengths=LENGTHS, advantages=ADVANTAGES, drift=0.3):
    """One dict a completion. By their mean drift, GSPO's clip acts on none of the odd ones and on some of the even."""
    generator = torch.Generator().manual_seed(0)

    def normal(n):
        return torch.randn(n, generator=generator, dtype=torch.float64)

    made = []
    for n, (length, advantage) in enumerate(zip(lengths, advantages, strict=True)):
        old, change = -normal(length).abs(), drift * normal(length)
        change = change - change.mean() + (2e-4 if n % 2 else 0.05) * (-1) ** (n // 2)
        made.append(
            dict(
                logprobs=(old + change).requires_grad_(),
                entropy=normal(length).abs().requires_grad_(),
                old=old,
                sampled=old + 0.2 * normal(length),
                reference=old + 0.4 * normal(length),
                advantage=advantage,
                weight=0.1 + 0.05 * n,
            )
        )
    return made


def micro_batch(made, layout, keep=("old", "reference")):
    """(logprobs, entropy, row): `thd` is one row of all documents, `padded` one row each with garbage around it.

    Without "old" in `keep` the policy's own logprobs are the old ones; so for "reference".
    """

    def lay(values, garbage):
        values = [v if torch.is_tensor(v) else torch.full_like(d["old"], v) for v, d in zip(values, made, strict=True)]
        if layout == "thd":
            return torch.cat(values)[None]
        width = max(map(len, values)) + 3
        rows = []
        for n, value in enumerate(values):
            left = n % 3
            full = value.new_full((width,), garbage)
            rows.append(torch.cat([full[:left], value, full[left + len(value) :]]))
        return torch.stack(rows)

    numbers = [torch.full_like(d["old"], n) for n, d in enumerate(made)]
    row = SimpleNamespace(
        weights_BK=lay([d["weight"] for d in made], 0.0),
        advantages_BK=lay([d["advantage"] for d in made], math.inf),
        sampled_logprobs_BK=lay([d["sampled"] for d in made], math.nan),
        document_BK=lay(numbers, 10**6).long(),
        documents=len(made),
        old_logprobs_BK=lay([d["old"] for d in made], math.nan) if "old" in keep else None,
        reference_logprobs_BK=lay([d["reference"] for d in made], -math.inf) if "reference" in keep else None,
    )
    return lay([d["logprobs"] for d in made], math.nan), lay([d["entropy"] for d in made], math.nan), row


def exp(x):
    return torch.exp(x) if -20 <= x <= 20 else torch.tensor(math.exp(math.copysign(20, x)), dtype=torch.float64)


def looped(document, cfg, reference):
    """Each token's loss, policy term and metrics."""
    new, old, sampled = document["logprobs"], document["old"], document["sampled"]
    advantage, length, rows = document["advantage"], len(new), []
    low = 0 if cfg.clip_low is None else 1 - cfg.clip_low
    high = math.inf if cfg.clip_high is None else 1 + cfg.clip_high

    def ratios(a, b, level):
        differences = [a[k] - b[k] for k in range(length)]
        if level == "token":
            return [exp(difference) for difference in differences]
        return [exp(sum(differences) / (length if level == "sequence_mean" else 1))] * length

    policy_ratios, token_ratios = ratios(new, old, cfg.ratio), ratios(new, old, "token")
    if cfg.correction.level != "none":
        corrections = ratios(old, sampled, cfg.correction.level)
    drift = sum(sampled[k].item() - new[k].item() for k in range(length)) / length
    for t in range(length):
        r, metrics = policy_ratios[t], {"entropy": document["entropy"][t]}
        below, above = (r < low).item(), (r > high).item()
        if cfg.surrogate is Surrogate.clip:  # verl: compute_policy_loss_vanilla, compute_policy_loss_gspo
            if advantage > 0:
                below, policy = False, -advantage * (high if above else r)
            elif cfg.dual_clip is not None and r > cfg.dual_clip:
                above, policy = False, -advantage * cfg.dual_clip
            else:
                above, policy = False, -advantage * (low if below else r)
            below, above = below and advantage < 0, above and advantage > 0
        elif cfg.surrogate is Surrogate.cispo:  # verl: compute_policy_loss_cispo
            policy = -advantage * min(max(r.item(), low), high) * new[t]
            below, above = below and advantage != 0, above and advantage != 0
        else:  # verl: compute_policy_loss_sapo
            tau = cfg.sapo_tau_positive if advantage > 0 else cfg.sapo_tau_negative
            policy = -advantage * 4 / tau / (1 + torch.exp(-tau * (r - 1)))
        if cfg.surrogate is not Surrogate.sapo:
            metrics |= {"clip_ratio/low_mean": below, "clip_ratio/high_mean": above}
        if cfg.correction.level != "none":  # verl: compute_rollout_correction_weights
            rho = corrections[t].item()
            bound = cfg.correction.cap if rho > cfg.correction.cap else cfg.correction.floor
            outside = not cfg.correction.floor <= rho <= cfg.correction.cap
            if outside:
                rho = bound if cfg.correction.mode is CorrectionMode.truncate else 0.0
            policy = policy * rho
            metrics |= {"correction/weight": rho, "correction/outside": outside}
        if cfg.off_policy_threshold is not None:  # TRL: GRPOTrainer.get_off_policy_mask
            masked = advantage < 0 and drift > cfg.off_policy_threshold
            policy = 0.0 * policy if masked else policy
            metrics["off_policy_masked"] = masked
        loss = policy
        if reference:  # verl: kl_penalty_forward; unbiased: TRL's use_bias_correction_kl
            x = new[t] - document["reference"][t]
            kl = {"k1": x, "k2": x * x / 2, "k3": exp(-x) + x - 1}[cfg.kl.estimator]
            kl = kl * token_ratios[t] if cfg.kl.unbiased else kl
            loss = loss + cfg.kl.coefficient * kl
            metrics["kl"] = kl
        loss = loss - cfg.entropy_coefficient * document["entropy"][t]
        rows.append((loss, policy, metrics))
    return rows


def gradients(made):
    grads = [(d["logprobs"].grad, d["entropy"].grad) for d in made]
    for d in made:
        d["logprobs"].grad = d["entropy"].grad = None
    return [torch.cat([torch.zeros_like(d["old"]) if g is None else g for g, d in zip(part, made, strict=True)])
            for part in zip(*grads, strict=True)]  # fmt: skip


def one_token_each(ratios, advantages, **cfg):
    """Completions of one token, whose old logprob is 0."""
    logprobs = torch.tensor([ratios], dtype=torch.float64).log().requires_grad_()
    row = SimpleNamespace(
        weights_BK=torch.ones(1, len(ratios)),
        advantages_BK=torch.tensor([advantages], dtype=torch.float64),
        sampled_logprobs_BK=torch.zeros(1, len(ratios), dtype=torch.float64),
        document_BK=torch.arange(len(ratios))[None],
        documents=len(ratios),
        old_logprobs_BK=torch.zeros(1, len(ratios), dtype=torch.float64),
        reference_logprobs_BK=None,
    )
    return logprobs, policy_terms(logprobs, torch.zeros_like(logprobs), row, AlgorithmConf(**cfg))
