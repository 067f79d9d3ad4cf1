"""Token losses and their gradients against a loop over tokens, see loss_cases.py."""

import pytest
import torch
from loss_cases import GSPO, LENGTHS, SAPO, VARIANTS, documents, gradients, looped, micro_batch

from posttrain.advantages import token_weights
from posttrain.config.algorithm import Aggregation, AlgorithmConf, KLConf, Ratio, Surrogate
from posttrain.losses import policy_terms


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


def test_what_is_missing_is_said():
    logprobs_BK, entropy_BK, row = micro_batch(documents(), "thd", keep=())
    with pytest.raises(ValueError, match="reference"):
        policy_terms(logprobs_BK, entropy_BK, row, AlgorithmConf(kl=KLConf(coefficient=0.1)))
    with pytest.raises(ValueError, match="gradient"):
        policy_terms(logprobs_BK, entropy_BK.detach(), row, AlgorithmConf(entropy_coefficient=0.1))
