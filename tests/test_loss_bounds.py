"""Where a loss is bounded: clips and what they count, huge ratios, garbage where nothing is trained on, the KL term."""

import math
from types import SimpleNamespace

import pytest
import torch
from loss_cases import VARIANTS, documents, gradients, micro_batch, one_token_each

from posttrain.config.algorithm import AlgorithmConf, KLConf, KLEstimator, Ratio, Surrogate
from posttrain.losses import kl, policy_terms


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
