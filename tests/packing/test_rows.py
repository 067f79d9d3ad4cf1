"""The tensors of a micro-batch, and the same loss and gradient however documents are split."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_cases import SHAPES, TINY_COST, conf, document
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from posttrain import packing
from posttrain.config import PackingConf, PackingMode
from posttrain.logprobs import token_logprobs
from posttrain.models import gdn_packing
from posttrain.models.head import find_head
from posttrain.models.shrink import slow_to_forget
from posttrain.models.tiny import tiny_config

CPU = torch.device("cpu")
PAD = 257
SPARE = packing.spare(document(9, 9).rollout)


SHAPE_LISTS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=40)
MODES = st.sampled_from(["thd", "padded"])


@settings(max_examples=50, deadline=None)
@given(SHAPE_LISTS, st.integers(1, 8), MODES, st.integers(1, 150))
def test_results_find_back_to_their_documents(shapes, ranks, mode, budget):
    documents = [document(*shape, number=n) for n, shape in enumerate(shapes)]
    plan = packing.plan(documents, SPARE, conf(mode, budget, multiple=8), ranks, TINY_COST)
    found = {}
    for row in (row for share in plan for row in share):
        built = packing.build(row, conf(mode, budget, multiple=8), PAD, CPU)
        found |= packing.unpack(built.targets_BK, row, conf(mode))
    assert [tuple(found.pop(n).tolist()) for n in range(len(shapes))] == [d.rollout.written for d in documents]
    assert not found


@pytest.mark.parametrize("mode", ["thd", "padded"])
@pytest.mark.parametrize("multiple", [1, 64])
def test_targets_weights_and_positions_against_a_loop(mode, multiple):
    row = [document(*shape, weight=n + 1.0, number=n) for n, shape in enumerate(SHAPES)]
    built = packing.build(row, conf(mode, 10_000, multiple), PAD, CPU)
    ids = built.inputs["input_ids"]
    assert ids.shape[1] % multiple == 0
    found = []
    for b in range(built.targets_BK.shape[0]):
        for k, position in enumerate(built.kept_K.tolist()):
            if built.weights_BK[b, k] > 0:
                assert ids[b, position + 1] == built.targets_BK[b, k]  # logits at a position predict the next token
                columns = (built.targets_BK, built.weights_BK, built.advantages_BK, built.sampled_logprobs_BK)
                found.append(tuple(round(column[b, k].item(), 5) for column in columns))
    wanted = [
        (token, d.weight, round(d.advantage, 5), round(logprob, 5))
        for d in row
        for token, logprob, own in zip(d.rollout.ids, d.rollout.logprobs, d.rollout.trained, strict=True)
        if own
    ]
    assert sorted(found) == sorted(wanted)


def test_padding_has_no_position_beyond_the_longest_document():
    """A model may have no more: one with as many positions as the longest document has tokens runs."""
    row = [document(5, 12, number=0), document(3, 1, number=1)]
    built = packing.build(row, conf("padded", 10_000, multiple=8), PAD, CPU)
    assert built.inputs["position_ids"].tolist() == [[*range(17), *[16] * 7]] * 2
    assert built.inputs["attention_mask"].tolist() == [[1] * 17 + [0] * 7, [1] * 4 + [0] * 20]
    config = GPT2Config(vocab_size=264, n_embd=16, n_layer=1, n_head=2, n_positions=17)
    assert GPT2LMHeadModel(config)(**built.inputs).logits.shape == (2, 24, 264)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3_5_dense"), dtype=torch.float32)
    gdn_packing.patch(model, CPU)
    return slow_to_forget(model)


def loss_and_gradient(model, plan, cfg):
    model.zero_grad()
    loss = 0.0
    for row in (row for share in plan for row in share):
        built = packing.build(row, cfg, PAD, CPU)
        logprobs_BK, _ = token_logprobs(model, built, 0.7, find_head(model))
        part = -(built.weights_BK * built.advantages_BK * logprobs_BK).sum()
        part.backward()
        loss += part.item()
    return loss, torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    "cfg, ranks",
    [
        (conf(budget=10_000), 1),
        (conf(budget=10_000, multiple=64), 1),
        (conf(budget=70), 1),
        (conf(budget=70), 3),
        (conf(budget=70), 16),  # more ranks than rows
        (conf("padded", budget=10_000), 1),
        (conf("padded", budget=200, multiple=8), 3),
    ],
)
def test_loss_and_gradient_do_not_depend_on_the_split(model, cfg, ranks):
    """Against each document alone in a plain model call, with its own log_softmax."""
    documents = [document(*shape, weight=1 / (n + 2), number=n) for n, shape in enumerate(SHAPES)]
    model.zero_grad()
    wanted = 0.0
    for d in documents:
        ids = torch.tensor([d.rollout.ids])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1] / 0.7
        tokens = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[-d.rollout.trained_tokens :]
        loss = -d.weight * d.advantage * tokens.sum()
        loss.backward()
        wanted += loss.item()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()]).clone()
    found, found_gradient = loss_and_gradient(model, packing.plan(documents, SPARE, cfg, ranks, TINY_COST), cfg)
    assert found == pytest.approx(wanted, rel=1e-5)
    assert (found_gradient - gradient).norm() / gradient.norm() < 1e-5


@pytest.mark.parametrize("mode", list(PackingMode))
def test_groups_of_losses_that_are_not_finite(mode):
    """Each group once, whatever stands at padding and in spare documents."""
    cfg = PackingConf(mode=mode)
    groups = [7, 8, 7, 9]
    documents = [document(3, 2 + n, number=n) for n in range(4)]
    documents = [replace(d, rollout=replace(d.rollout, group=g)) for d, g in zip(documents, groups, strict=True)]
    share = [documents[:3], [documents[3]], [SPARE]]
    rows = [packing.build(row, cfg, 0, torch.device("cpu")) for row in share]
    losses = [torch.zeros(row.targets_BK.shape) for row in rows]
    losses[2][:] = float("nan")
    assert packing.not_finite(losses, share, cfg) == []
    for n in (0, 2):
        losses[0][(rows[0].document_BK == n) & (rows[0].weights_BK > 0)] = float("inf")
    assert packing.not_finite(losses, share, cfg) == [7]
    losses[1][0, -1] = float("nan")
    assert packing.not_finite(losses, share, cfg) == [7, 9]


def test_entropy_against_torch(model):
    built = packing.build([document(5, 9), document(4, 30)], conf(), PAD, CPU)
    _, entropy_BK = token_logprobs(model, built, 1.3, find_head(model))
    logits = model(**built.inputs).logits[:, built.kept_K].float() / 1.3
    assert torch.allclose(entropy_BK, torch.distributions.Categorical(logits=logits).entropy(), atol=1e-5)
