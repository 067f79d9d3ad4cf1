"""The local sampler against transformers' generate, teacher forcing and the distribution it claims to draw from."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from posttrain import packing
from posttrain.config import Architecture, ModelConf, PackingConf, PackingMode, RolloutConf
from posttrain.config.task import ArithmeticConf, TaskName
from posttrain.models import gdn_packing
from posttrain.models.loading import end_token_ids, load
from posttrain.models.tiny import EMBEDDED, tiny_config
from posttrain.records import Document, Problem
from posttrain.rollout.local import generate, sample
from posttrain.tasks import make_task

END, PAD = frozenset({256, 7}), 257
FAMILIES = ["qwen3_5_dense", "qwen3_5_moe", "qwen3_next", "qwen3_dense"]
CFG = RolloutConf(group_size=3, max_new_tokens=12)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    torch.manual_seed(1)
    config = tiny_config(request.param)
    config.initializer_range = 0.1
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    gdn_packing.patch(model, "cpu")
    return model


def problems(*lengths):
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]
    return [
        (10 + n, Problem(task="t", index=n, prompt="", prompt_ids=tuple(row), answer="")) for n, row in enumerate(ids)
    ]


def run(model, batch, cfg=CFG, key=(0, 0)):
    return generate(model, batch, cfg, key=key, end_ids=END, pad_id=PAD)


def test_greedy_equals_generate(model):
    batch = problems(1, 5, 30, 66)
    found = run(model, batch, dataclasses.replace(CFG, group_size=1, temperature=0.0))
    for (_, problem), rollout in zip(batch, found, strict=True):
        ids = model.generate(
            torch.tensor([problem.prompt_ids]),
            max_new_tokens=CFG.max_new_tokens,
            do_sample=False,
            eos_token_id=list(END),
            pad_token_id=PAD,
        )
        assert rollout.written == tuple(ids[0, len(problem.prompt_ids) :].tolist())
        assert rollout.finish_reason == ("stop" if rollout.written[-1] in END else "length")


@pytest.mark.parametrize("mode", list(PackingMode))
def test_padding_with_an_end_token_loses_no_end(model, mode):
    """No token is taken for padding because of its id, by sampler or packed row; every end token is trained on."""
    batch = problems(2, 9, 31)
    cfg = dataclasses.replace(CFG, max_new_tokens=200)  # of 264 tokens two end
    found = run(model, batch, cfg)
    assert {r.written[-1] for r in found if r.finished} == END
    as_pad = generate(model, batch, cfg, key=(0, 0), end_ids=END, pad_id=256)
    assert [r.written for r in as_pad] == [r.written for r in found]
    documents = [Document(rollout=r, advantage=1.0, weight=0.5, index=n) for n, r in enumerate(found)]
    row = packing.build(documents, PackingConf(mode=mode, pad_multiple=64), 256, torch.device("cpu"))
    trained = row.targets_BK[row.weights_BK > 0].tolist()
    assert sorted(trained) == sorted(token for r in found for token in r.written)


def test_logits_that_are_not_finite_are_named(model, monkeypatch):
    monkeypatch.setattr(model, "forward", _nan(model.forward))
    with pytest.raises(FloatingPointError, match="logits are not finite"):
        run(model, problems(3))


def _nan(forward):
    def broken(*arguments, **options):
        out = forward(*arguments, **options)
        out.logits *= float("nan")
        return out

    return broken


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_teacher_forcing(model, temperature):
    for rollout in run(model, problems(2, 9, 31), dataclasses.replace(CFG, temperature=temperature)):
        ids = torch.tensor([rollout.ids])
        with torch.no_grad():
            logprobs = (model(input_ids=ids, use_cache=False).logits[0] / temperature).log_softmax(-1)
        ((first, end),) = rollout.turns
        wanted = logprobs[first - 1 : -1].gather(1, ids[0, first:, None]).squeeze(1)
        assert end == len(rollout.ids) and torch.allclose(torch.tensor(rollout.logprobs[first:]), wanted, atol=2e-4)
        assert rollout.written[-1] in END or len(rollout.written) == CFG.max_new_tokens
        assert not END & set(rollout.written[:-1])


def test_samples_do_not_depend_on_how_prompts_are_spread(model):
    batch = problems(3, 8, 8, 21)
    together = run(model, batch)
    apart = [rollout for n in (1, 0) for rollout in run(model, batch[n::2])]
    small = run(model, batch, dataclasses.replace(CFG, batch_size=3))
    order = {(r.group, r.written) for r in together}
    assert len(together) == 12 and [r.group for r in together] == [10] * 3 + [11] * 3 + [12] * 3 + [13] * 3
    assert order == {(r.group, r.written) for r in apart} == {(r.group, r.written) for r in small}
    assert together == run(model, batch) and together != run(model, batch, key=(0, 1))
    assert model.training is False


@pytest.mark.parametrize("family", FAMILIES)
def test_the_embedded_models_are_warm_started(family):
    """Right on a quarter to a half of the held-out sums, and small enough to ship."""
    model, tokenizer = load(ModelConf(architecture=Architecture(family)))
    gdn_packing.patch(model)
    task = make_task(ArithmeticConf(name=TaskName.arithmetic, largest=49), tokenizer)
    cfg = RolloutConf(group_size=2, max_new_tokens=8)
    rollouts = generate(
        model,
        list(enumerate(task.heldout)),
        cfg,
        key=(5,),
        end_ids=end_token_ids(model, tokenizer),
        pad_id=tokenizer.pad_token_id,
    )
    scored = task.score([(task.heldout[rollout.group], rollout) for rollout in rollouts])
    right = sum(each.scores["correct"] for each in scored) / len(scored)
    assert 0.25 <= right <= 0.5
    assert 300_000 <= model.num_parameters() <= 1_000_000 and model.dtype is torch.float32
    assert (EMBEDDED / family / "model.safetensors").stat().st_size < 2e6
    layers = getattr(model.config, "layer_types", [])
    assert family == "qwen3_dense" or layers == ["linear_attention"] * 3 + ["full_attention"]


def test_modules_are_in_training_as_before_and_checkpointing_recomputes():
    """Also where some are in training and some are not: a frozen part may be."""
    model, _ = load(ModelConf(architecture=Architecture.qwen3_5_dense, gradient_checkpointing=True))
    gdn_packing.patch(model)
    model.train()
    model.model.layers[1].eval()
    before = [module.training for module in model.modules()]
    assert True in before and False in before
    inside = []
    hook = model.model.layers[0].register_forward_hook(lambda module, *_: inside.append(module.training))
    run(model, problems(4))
    assert inside and not any(inside) and [module.training for module in model.modules()] == before
    hook.remove()
    calls = []
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    model(input_ids=torch.ones(1, 5, dtype=torch.long), use_cache=False).logits.sum().backward()
    assert len(calls) == 2


def test_absolute_positions_and_unequal_prompts():
    """Left padding shifts no position: a batch is what its prompts are one by one."""
    torch.manual_seed(2)
    config = GPT2Config(vocab_size=264, n_positions=128, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    batch = problems(1, 40, 7)
    together, apart = run(model, batch), [rollout for each in batch for rollout in run(model, [each])]
    assert [r.ids for r in together] == [r.ids for r in apart]
    for a, b in zip(together, apart, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_no_prompts_no_rollouts(model):
    assert run(model, []) == []


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.5, 1.0), (1.0, 0.7)])
def test_samples_follow_the_distribution(temperature, top_p):
    torch.manual_seed(0)
    logits = torch.randn(1, 12) * 2
    tokens, logprobs = sample(logits.expand(200_000, -1), torch.rand(200_000), temperature, top_p)
    wanted = (logits[0] / temperature).softmax(-1)
    if top_p < 1:  # the smallest set of the likeliest tokens that holds top_p of the mass, by a loop
        kept, mass = [], 0.0
        for token in wanted.argsort(descending=True).tolist():
            if mass >= top_p:
                break
            kept.append(token)
            mass += wanted[token].item()
        wanted = torch.stack([wanted[t] / mass if t in kept else torch.zeros(()) for t in range(12)])
    frequency = tokens.bincount(minlength=12) / len(tokens)
    assert torch.allclose(frequency, wanted, atol=5e-3)
    assert frequency[wanted == 0].sum() == 0
    assert torch.allclose(logprobs.exp(), wanted[tokens], atol=1e-5)


def test_the_edges_of_the_uniform_stay_inside_the_vocabulary():
    logits = torch.tensor([[-1e9, 0.0, 0.0, -1e9]]).expand(2, -1)
    tokens, _ = sample(logits, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64), 1.0, 1.0)
    assert tokens.tolist() == [1, 2]
