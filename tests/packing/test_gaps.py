"""Documents whose trained tokens have gaps: loss and gradients of each alone, token by token, in every layout.

Models with an absolute position (gpt2, in fp64) and with a state (qwen3_5, in fp32). The wanted side never sees a
packed row: a plain call of each document alone, its own log_softmax, and the loop of loss_cases.py.
"""

import copy
from dataclasses import replace

import pytest
import torch
from architecture_cases import patched
from loss_cases import VARIANTS, correct, looped
from packing_cases import MASKS, TINY_COST, conf, masked

from posttrain import packing
from posttrain.config.algorithm import AlgorithmConf
from posttrain.logprobs import token_logprobs
from posttrain.losses import policy_terms
from posttrain.models.head import find_head
from posttrain.records import Group, Problem, Rollout

CPU, PAD, TEMPERATURE = torch.device("cpu"), 3, 0.7
# Whole eighths, so that fp32 holds them exactly.
DOCUMENTS = [
    masked(mask, n, advantage=(-1) ** n * (n + 1) / 8, weight=(n % 3 + 1) / 8) for n, mask in enumerate(MASKS.values())
]
SPARE = packing.spare(DOCUMENTS[0].rollout)
LAYOUTS = {
    "thd, one row": conf("thd", budget=1000),
    "thd, one row with padding": conf("thd", budget=1000, multiple=64),
    "thd, several rows": conf("thd", budget=40),
    "padded, one micro-batch": conf("padded", budget=10_000),
    "padded, several micro-batches": conf("padded", budget=60, multiple=8),
}
CHOSEN = {
    name: VARIANTS[name] for name in ("grpo", "dapo", "gspo", "cispo", "sapo", "rloo", "k3 unbiased, gspo", "entropy")
}
# Bounds that some documents are within: their sampler's logprobs are random.
CHOSEN["mask means"] = dict(correction=correct("sequence_mean", "mask", cap=1.0, floor=0.3))
CHOSEN["truncate tokens"] = dict(correction=correct("token", "truncate", cap=3.0, floor=0.1))
CHOSEN["off-policy mask"] = dict(off_policy_threshold=0.5)


class Policies:
    """The policy that is updated, the one before it, and the reference: the same architecture, other weights."""

    def __init__(self, name: str, dtype: torch.dtype):
        self.head = find_head(patched(name))
        self.new = copy.deepcopy(patched(name)).to(dtype)
        self.old, self.reference = (self._near(seed) for seed in (1, 2))
        self.rows = {name: list(rows_of(self, layout)) for name, layout in LAYOUTS.items()}
        self.before = [[alone(model, document)[0] for model in (self.old, self.reference)] for document in DOCUMENTS]
        assert self.head.linear is patched(name).get_output_embeddings()

    def _near(self, seed: int):
        other, generator = copy.deepcopy(self.new), torch.Generator().manual_seed(seed)
        for parameter in other.parameters():
            parameter.data += 0.02 * parameter.data.std() * torch.randn(parameter.shape, generator=generator)
        return other.requires_grad_(False)

    def logprobs(self, model, row, entropy_gradient=False):
        head = replace(self.head, linear=model.get_output_embeddings())
        return token_logprobs(model, row, TEMPERATURE, head, entropy_gradient)


@pytest.fixture(scope="module", params=[("gpt2", torch.float64), ("qwen3_5_text", torch.float32)], ids=lambda p: p[0])
def policies(request):
    return Policies(*request.param)


def alone(model, document):
    """Logprobs and entropies of a document's trained tokens in a plain call, each by the logits before it."""
    ids, trained = document.rollout.ids, document.rollout.trained
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    logprobs, entropies = [], []
    for position in range(1, len(ids)):
        if trained[position]:
            table = (logits[position - 1].double() / TEMPERATURE).log_softmax(-1)
            logprobs.append(table[ids[position]])
            entropies.append(-(table.exp() * table).sum())
    nothing = logits.new_zeros(0, dtype=torch.float64)
    return (torch.stack(logprobs), torch.stack(entropies)) if logprobs else (nothing, nothing)


def sampled(document):
    pairs = zip(document.rollout.logprobs, document.rollout.trained, strict=True)
    return torch.tensor([logprob for logprob, own in pairs if own], dtype=torch.float64)


def wanted(policies, cfg):
    """The loss of all documents and its gradients."""
    loss = torch.zeros((), dtype=torch.float64)
    for document, (old, reference) in zip(DOCUMENTS, policies.before, strict=True):
        logprobs, entropy = alone(policies.new, document)
        one = dict(logprobs=logprobs, entropy=entropy, old=old, sampled=sampled(document), reference=reference)
        one["advantage"] = document.advantage
        if len(logprobs):
            loss = loss + document.weight * sum(token for token, *_ in looped(one, cfg, bool(cfg.kl.coefficient)))
    return loss.item(), torch.autograd.grad(loss, list(policies.new.parameters()), materialize_grads=True)


def rows_of(policies, layout):
    """The micro-batches of a plan on two ranks, with the other policies' logprobs, and NaN wherever nothing counts."""
    plan = packing.plan(DOCUMENTS, SPARE, layout, 2, TINY_COST)
    for row in (row for share in plan for row in share):
        built = packing.build(row, layout, PAD, CPU)
        with torch.no_grad():
            old_BK, reference_BK = (policies.logprobs(m, built)[0] for m in (policies.old, policies.reference))
        nothing_BK = built.weights_BK == 0
        fields = dict(
            old_logprobs_BK=old_BK,
            reference_logprobs_BK=reference_BK,
            sampled_logprobs_BK=built.sampled_logprobs_BK,
            advantages_BK=built.advantages_BK,
        )
        yield (
            row,
            replace(built, **{name: values.masked_fill(nothing_BK, float("nan")) for name, values in fields.items()}),
        )


def found(policies, cfg, layout):
    model, loss = policies.new, 0.0
    model.zero_grad()
    for _, row in policies.rows[layout]:
        logprobs_BK, entropy_BK = policies.logprobs(model, row, entropy_gradient=True)
        terms = policy_terms(logprobs_BK, entropy_BK, row, cfg)
        part = (row.weights_BK * terms.loss_BK).sum()
        part.backward()
        loss += part.item()
    return loss, [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


@pytest.mark.parametrize("name", CHOSEN)
def test_loss_and_gradients_of_each_document_alone(policies, name):
    cfg = AlgorithmConf(**CHOSEN[name])
    loss, gradients = wanted(policies, cfg)
    tolerance = 1e-10 if gradients[0].dtype is torch.float64 else 2e-5
    largest = max(gradient.abs().max() for gradient in gradients)
    assert largest > 1e-3
    for layout in LAYOUTS:
        packed_loss, packed_gradients = found(policies, cfg, layout)
        assert packed_loss == pytest.approx(loss, rel=tolerance, abs=tolerance), layout
        for one, other in zip(packed_gradients, gradients, strict=True):
            assert (one - other).abs().max() <= tolerance * largest, layout


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_find_back_to_their_documents(policies, layout):
    """Each document's logprobs, in the order of its trained tokens; an empty tensor where it has none."""
    found = {}
    for row, built in policies.rows[layout]:
        with torch.no_grad():
            found |= packing.unpack(policies.logprobs(policies.new, built)[0], row, LAYOUTS[layout])
        for values_BK, ours in ((built.targets_BK, "ids"), (built.sampled_logprobs_BK, "logprobs")):
            for index, values in packing.unpack(values_BK, row, LAYOUTS[layout]).items():
                rollout = DOCUMENTS[index].rollout
                own = [value for value, own in zip(getattr(rollout, ours), rollout.trained, strict=True) if own]
                assert values.tolist() == own
    assert sorted(found) == list(range(len(DOCUMENTS)))
    tolerance = 1e-10 if policies.new.dtype is torch.float64 else 2e-5
    for document in DOCUMENTS:
        with torch.no_grad():
            logprobs, _ = alone(policies.new, document)
        assert found[document.index].shape == (document.rollout.trained_tokens,)
        assert torch.allclose(found[document.index].double(), logprobs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_positions_that_some_document_needs_go_through_the_head(layout):
    """thd: the trained tokens and no other. padded: where at least one document of the micro-batch has one."""
    cfg = LAYOUTS[layout]
    for row in (row for share in packing.plan(DOCUMENTS, SPARE, cfg, 2, TINY_COST) for row in share):
        built = packing.build(row, cfg, PAD, CPU)
        trained = [[n - 1 for n, own in enumerate(d.rollout.trained) if own] for d in row]
        positions = set().union(*trained)
        count = len(positions) if cfg.mode == "padded" else sum(map(len, trained))
        assert built.kept_K.shape == (count,) and built.targets_BK.shape[1] == count
        if cfg.mode == "padded":
            assert set(built.kept_K.tolist()) == positions
        assert (built.weights_BK > 0).sum() == sum(len(own) for own, d in zip(trained, row, strict=True) if d.weight)


@pytest.mark.parametrize("mode", ["thd", "padded"])
def test_a_micro_batch_without_a_trained_token(policies, mode):
    """All ranks run backward in every micro-batch: also this one, of loss 0 and gradients 0."""
    empty = DOCUMENTS[list(MASKS).index("none")]
    row = packing.build([replace(empty, index=n) for n in range(2)], conf(mode), PAD, CPU)
    for head in (policies.head, replace(policies.head, linear=None)):
        if head.linear is not None:
            head = replace(head, linear=policies.new.get_output_embeddings())
        policies.new.zero_grad()
        logprobs_BK, entropy_BK = token_logprobs(policies.new, row, TEMPERATURE, head, entropy_gradient=True)
        loss = (row.weights_BK * policy_terms(logprobs_BK, entropy_BK, row, AlgorithmConf()).loss_BK).sum()
        loss.backward()
        assert loss.item() == 0 and not any(p.grad is not None and p.grad.any() for p in policies.new.parameters())


def rollout(**changes):
    fields = dict(
        group=0,
        sample=0,
        ids=(5, 6, 7),
        trained=(False, True, True),
        logprobs=(0.0, -1.0, -2.0),
        versions=(-1, 0, 0),
        turns=((1, 3),),
        finish_reason="stop",
    )
    return Rollout(**fields | changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(trained=(False, True)), r"3 ids, but \[2, 3\] entries"),
        (dict(logprobs=(0.0, -1.0, -2.0, -3.0)), r"3 ids, but \[3, 4\] entries"),
        (dict(versions=()), r"3 ids, but \[0, 3\] entries"),
        (dict(ids=(5, 6)), r"2 ids, but \[3\] entries"),
        (dict(ids=(), trained=(), logprobs=(), versions=(), turns=()), "at least one token"),
        (dict(trained=(True, True, True)), "first token.*nothing predicts it"),
        (dict(turns=((1, 2),)), r"token 2 is trained on.*nobody sampled it"),
        (dict(turns=()), r"token 1 is trained on"),
        (dict(turns=((1, 3), (2, 3))), "overlap"),
        (dict(turns=((1, 4),)), "outside of 3 ids"),
        (dict(turns=((3, 1),)), "overlap"),
        (dict(finish_reason="eos"), "finish_reason='eos' is none of stop, length"),
    ],
)
def test_entries_that_do_not_fit_are_refused(changes, message):
    assert rollout().trained_tokens == 2 and rollout().written == (6, 7)
    with pytest.raises(ValueError, match=message):
        rollout(**changes)


def test_scores_of_one_group_have_the_same_names():
    problem = Problem(task="", index=0, prompt="", prompt_ids=(5,), answer="")
    group = Group(problem=problem).with_rollout(rollout(), {"total": 1.0, "correct": 1.0})
    assert group.with_rollout(rollout(), {"correct": 0.0, "total": 0.5}).scores["total"] == (1.0, 0.5)
    with pytest.raises(ValueError, match=r"\['total'\] beside \['correct', 'total'\]"):
        group.with_rollout(rollout(), {"total": 1.0})


def test_a_conversation_with_a_tool():
    """What the model wrote is what its turns hold; what is trained on is what the mask holds."""
    tool = rollout(
        ids=(5, 6, 7, 8, 9, 3),
        trained=(False, False, True, True, False, True),
        logprobs=(0.0,) * 6,
        versions=(-1, -1, 41, 41, -1, 42),
        turns=((2, 4), (5, 6)),
    )
    assert tool.written == (7, 8, 3) and tool.written_tokens == tool.trained_tokens == 3 and len(tool) == 6
