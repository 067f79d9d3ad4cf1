"""Token losses against a loop that follows the papers' equations one token at a time, in fp64, with gradients.

The loop decides by the sign of the advantage where the code takes minima, and computes ratios of plain numbers.
"""

import math
from types import SimpleNamespace

import pytest
import torch

from posttrain.advantages import token_weights
from posttrain.config.algorithm import (
    Aggregation,
    CorrectionConf,
    CorrectionLevel,
    CorrectionMode,
    KLConf,
    KLEstimator,
    AlgorithmConf,
    Ratio,
    Surrogate,
)
from posttrain.losses import kl, policy_terms

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


@pytest.mark.parametrize("layout", ["thd", "padded"])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_against_a_loop(name, layout):
    cfg, made = AlgorithmConf(**VARIANTS[name]), documents()
    reference = bool(cfg.kl.coefficient)
    logprobs_BK, entropy_BK, row = micro_batch(made, layout, ("old", "reference") if reference else ("old",))
    trained_BK = row.weights_BK > 0
    terms = policy_terms(logprobs_BK, entropy_BK, row, cfg)
    (row.weights_BK * terms.loss_BK).sum().backward()
    found = gradients(made)

    rows = [(d["weight"], *token) for d in made for token in looped(d, cfg, reference)]
    sum(weight * loss for weight, loss, _, _ in rows).backward()
    wanted = gradients(made)

    def column(values):
        return torch.tensor([float(v.detach() if torch.is_tensor(v) else v) for v in values], dtype=torch.float64)

    close = dict(rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(terms.loss_BK[trained_BK].detach(), column(loss for _, loss, _, _ in rows), **close)
    torch.testing.assert_close(terms.policy_BK[trained_BK], column(policy for _, _, policy, _ in rows), **close)
    torch.testing.assert_close(found, wanted, **close)
    assert set(terms.means) == set(rows[0][3])
    for metric, values_BK in terms.means.items():
        torch.testing.assert_close(
            values_BK[trained_BK].double(), column(metrics[metric] for *_, metrics in rows), **close
        )
    if layout == "padded":
        assert not (~trained_BK & (terms.loss_BK != 0)).any()


@pytest.mark.parametrize("name", ["grpo", "gspo", "mask tokens", "off-policy mask"])
def test_the_documents_reach_every_branch(name):
    """Else the comparison above would compare less than it says."""
    cfg = AlgorithmConf(**VARIANTS[name])
    means = policy_terms(*micro_batch(documents(), "thd"), cfg).means
    for metric in means.keys() - {"entropy", "kl"}:
        assert means[metric].min() < means[metric].max(), metric


@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_the_sequence_ratio_has_the_gradient_of_gspos_straight_through_form(aggregation):
    """verl's compute_policy_loss_gspo: log s_t = sg(mean log-ratio) + logp_t - sg(logp_t)."""
    cfg, made = AlgorithmConf(**GSPO), documents()
    for document, weight in zip(made, token_weights(LENGTHS, aggregation, 64), strict=True):
        document["weight"] = weight
    logprobs_BK, entropy_BK, row = micro_batch(made, "thd")
    (row.weights_BK * policy_terms(logprobs_BK, entropy_BK, row, cfg).loss_BK).sum().backward()
    found = gradients(made)
    total = 0
    for d in made:
        mean = (d["logprobs"] - d["old"]).mean().detach()
        s = (mean + d["logprobs"] - d["logprobs"].detach()).exp()
        a = d["advantage"]
        total = total + d["weight"] * torch.maximum(-a * s, -a * s.clamp(1 - 3e-4, 1 + 4e-4)).sum()
    total.backward()
    torch.testing.assert_close(found, gradients(made), rtol=1e-12, atol=1e-15)


def test_the_product_of_ratios_is_one_loss_a_completion():
    """RLOO: with the mean over tokens and then completions, mean over completions of -min(r A, clip(r) A)."""
    cfg, made = AlgorithmConf(ratio=Ratio.sequence_sum), documents(drift=0.02)
    for document, weight in zip(made, token_weights(LENGTHS, Aggregation.seq_mean_token_mean, 64), strict=True):
        document["weight"] = weight
    logprobs_BK, entropy_BK, row = micro_batch(made, "thd")
    found = (row.weights_BK * policy_terms(logprobs_BK, entropy_BK, row, cfg).loss_BK).sum()
    found.backward()
    found_gradients, wanted = gradients(made), 0
    for d in made:
        r = (d["logprobs"].sum() - d["old"].sum()).exp()
        wanted = wanted - torch.min(r * d["advantage"], r.clamp(0.8, 1.2) * d["advantage"]) / len(made)
    wanted.backward()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-12)
    torch.testing.assert_close(found_gradients, gradients(made), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("ratio", list(Ratio))
@pytest.mark.parametrize("surrogate", [{}, SAPO, dict(surrogate=Surrogate.cispo)])
def test_before_any_update_it_is_the_policy_gradient(ratio, surrogate):
    cfg, made = AlgorithmConf(**surrogate, ratio=ratio), documents()
    logprobs_BK, entropy_BK, row = micro_batch(made, "padded", keep=())
    terms = policy_terms(logprobs_BK, entropy_BK, row, cfg)
    trained_BK = row.weights_BK > 0
    (row.weights_BK * terms.loss_BK).sum().backward()
    # A product's gradient stands once on each of its tokens, and all of them add up.
    times = [
        len(d["old"]) if ratio is Ratio.sequence_sum and surrogate.get("surrogate") != "cispo" else 1 for d in made
    ]
    wanted = [torch.full_like(d["old"], -d["weight"] * d["advantage"] * n) for d, n in zip(made, times, strict=True)]
    torch.testing.assert_close(gradients(made)[0], torch.cat(wanted))
    assert terms.old_logprobs_BK[trained_BK].equal(logprobs_BK.detach()[trained_BK])
    if not surrogate:
        assert terms.loss_BK[trained_BK].equal(-row.advantages_BK[trained_BK])  # the ratio is exactly 1
    for side in ("low", "high"):
        assert surrogate is SAPO or not terms.means[f"clip_ratio/{side}_mean"].any()


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


@pytest.mark.parametrize("ratio", list(Ratio))
def test_clip_fraction_counts_only_where_the_clip_acts(ratio):
    _, terms = one_token_each([0.5, 0.5, 1.5, 1.5], [-1.0, 1.0, -1.0, 1.0], ratio=ratio)
    assert terms.means["clip_ratio/low_mean"].tolist() == [[1, 0, 0, 0]]
    assert terms.means["clip_ratio/high_mean"].tolist() == [[0, 0, 0, 1]]


def test_a_weight_that_is_bounded_counts_whatever_the_advantage():
    _, terms = one_token_each([0.5, 0.5, 1.5, 1.5, 1.5], [-1.0, 1.0, -1.0, 1.0, 0.0], surrogate=Surrogate.cispo)
    assert terms.means["clip_ratio/low_mean"].tolist() == [[1, 1, 0, 0, 0]]
    assert terms.means["clip_ratio/high_mean"].tolist() == [[0, 0, 1, 1, 0]]


def test_dual_clip_bounds_what_a_ratio_counts():
    logprobs, terms = one_token_each([2.0, 5.0, 5.0], [-1.0, -1.0, 1.0], dual_clip=3.0)
    terms.loss_BK.sum().backward()
    assert terms.loss_BK.tolist()[0] == pytest.approx([2.0, 3.0, -1.2])
    assert logprobs.grad.tolist()[0] == pytest.approx([2.0, 0.0, 0.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [19.0, 88.0, 1e4, -88.0, -1e4])
@pytest.mark.parametrize("name", VARIANTS)
def test_huge_ratios_stay_finite(name, gap, dtype):
    cfg, made = AlgorithmConf(**VARIANTS[name]), documents()
    for document in made:
        for name in ("logprobs", "entropy", "old", "sampled", "reference"):
            document[name] = document[name].detach().to(dtype).requires_grad_(name in ("logprobs", "entropy"))
        document["old"] -= gap
        document["sampled"] += gap
        document["reference"] += gap
    logprobs_BK, entropy_BK, row = micro_batch(made, "padded")
    terms = policy_terms(logprobs_BK, entropy_BK, row, cfg)
    (row.weights_BK * terms.loss_BK).sum().backward()
    assert terms.loss_BK.isfinite().all() and all(g.isfinite().all() for g in gradients(made))
    assert all(values_BK.isfinite().all() for values_BK in terms.means.values())
    assert all(values_BK.shape == terms.loss_BK.shape for values_BK in terms.means.values())


def test_beyond_twenty_a_ratio_is_constant():
    logprobs, terms = one_token_each([math.exp(19), math.exp(21)], [-1.0, -1.0])
    terms.loss_BK.sum().backward()
    assert terms.loss_BK.tolist()[0] == pytest.approx([math.exp(19), math.exp(20)])
    assert logprobs.grad.tolist()[0] == pytest.approx([math.exp(19), 0.0])


def test_k3_is_bounded_at_twenty_alone():
    """verl caps its value at 10; where ours ends there is no gradient."""
    gap = torch.tensor([[-15.0, 3.0, 15.0, 25.0]], dtype=torch.float64)
    logprobs = torch.zeros_like(gap, requires_grad=True)
    found = kl(logprobs, gap, KLEstimator.k3)
    found.sum().backward()
    exact = [math.exp(d) - d - 1 for d in (-15.0, 3.0, 15.0, 20.0)]
    assert found[0].tolist() == pytest.approx(exact, rel=1e-12)
    slopes = [1 - math.exp(d) for d in (-15.0, 3.0, 15.0)]
    assert logprobs.grad[0].tolist() == pytest.approx([*slopes, 0.0], rel=1e-12)


@pytest.mark.parametrize("name", VARIANTS)
def test_garbage_gets_no_gradient(name):
    """Nor does a document without a token to train on; anomaly detection finds NaN also where a mask hides it."""
    made = documents()
    made[3]["weight"] = 0.0
    logprobs_BK, entropy_BK, row = micro_batch(made, "padded")
    logprobs_BK = logprobs_BK.detach().requires_grad_()
    with torch.autograd.set_detect_anomaly(True):
        terms = policy_terms(logprobs_BK, entropy_BK, row, AlgorithmConf(**VARIANTS[name]))
        (terms.loss_BK * row.weights_BK).sum().backward()
    trained_BK = row.weights_BK > 0
    assert logprobs_BK.grad[~trained_BK].eq(0).all() and logprobs_BK.grad[trained_BK].any()
    assert terms.loss_BK[~trained_BK].eq(0).all() and terms.policy_BK[~trained_BK].eq(0).all()


@pytest.mark.parametrize(
    ("estimator", "unbiased", "on_policy", "exact"),
    [
        ("k1", True, False, True),
        ("k3", True, False, True),
        ("k3", True, True, True),
        ("k2", False, True, True),
        ("k3", False, True, False),
        ("k3", False, False, False),
        ("k1", False, True, False),
    ],
)
def test_the_gradient_of_the_kl_divergence(estimator, unbiased, on_policy, exact):
    """Expectation over all tokens of a small vocabulary, drawn from the old policy, against the divergence itself."""
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    reference, old = (torch.randn(6, dtype=torch.float64).log_softmax(0) for _ in range(2))
    logprobs = logits.log_softmax(0)
    old = logprobs.detach() if on_policy else old
    (wanted,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    row = SimpleNamespace(
        weights_BK=old.exp()[None],
        advantages_BK=torch.zeros(1, 6, dtype=torch.float64),
        sampled_logprobs_BK=old[None],
        document_BK=torch.arange(6)[None],
        documents=6,
        old_logprobs_BK=None if on_policy else old[None],
        reference_logprobs_BK=reference[None],
    )
    cfg = AlgorithmConf(kl=KLConf(coefficient=1.0, estimator=KLEstimator(estimator), unbiased=unbiased))
    loss = (row.weights_BK * policy_terms(logprobs[None], torch.zeros(1, 6), row, cfg).loss_BK).sum()
    (found,) = torch.autograd.grad(loss, logits)
    assert torch.allclose(found, wanted, rtol=1e-10) is exact


def test_what_is_missing_is_said():
    logprobs_BK, entropy_BK, row = micro_batch(documents(), "thd", keep=())
    with pytest.raises(ValueError, match="reference"):
        policy_terms(logprobs_BK, entropy_BK, row, AlgorithmConf(kl=KLConf(coefficient=0.1)))
    with pytest.raises(ValueError, match="gradient"):
        policy_terms(logprobs_BK, entropy_BK.detach(), row, AlgorithmConf(entropy_coefficient=0.1))
