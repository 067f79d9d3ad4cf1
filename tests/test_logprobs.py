"""Logprobs and entropies through chunks of the vocabulary: against all logits at once, in plain torch."""

import dataclasses
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, LlamaConfig, LlamaForCausalLM

from posttrain import logprobs
from posttrain.logprobs import find_head, linear_logprobs, token_logprobs
from posttrain.models import gdn_packing
from posttrain.models.architectures import architectures, default_config, tiny
from posttrain.models.shrink import shrunk, slow_to_forget

NEEDS_ANOTHER_MODEL = {"gemma4_assistant", "gemma4_unified_assistant"}  # drafts from the states of a larger model
NOT_PLAIN_TEXT = {"musicgen", "musicgen_melody"}  # several codebooks a position
FULL_LOGITS = {"prophetnet"}  # its head predicts several tokens

N, D, V = 37, 16, 1000
EACH = 4 * N  # bytes of one column of logits


@pytest.fixture(autouse=True)
def the_same_numbers_in_any_order():
    torch.manual_seed(0)


def tensors(dtype=torch.float32, loud=1.0, bias=True, seed=0):
    """hidden [1, N, D], weight [V, D], bias [V] with gradients, targets [1, N] and two gradients [1, N]."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, shift = (torch.randn(*shape, generator=generator) for shape in ((1, N, D), (V, D), (V,)))
    leaves = [(hidden * loud).to(dtype), weight.to(dtype), shift.to(dtype) if bias else None]
    leaves = [leaf if leaf is None else leaf.requires_grad_() for leaf in leaves]
    targets = torch.randint(V, (1, N), generator=generator)
    targets[0, :2] = torch.tensor([0, V - 1])
    return leaves, targets, torch.randn(2, 1, N, generator=generator)


def naive(hidden, weight, bias, targets, temperature=1.0, scale=1.0, cap=None):
    """All logits, in fp64."""
    x = nn.functional.linear(*(None if t is None else t.double() for t in (hidden, weight, bias)))
    y = (scale * x if cap is None else cap * torch.tanh(scale * x / cap)) / temperature
    p = torch.distributions.Categorical(logits=y)
    return p.log_prob(targets), p.entropy()


def gradients(values, weights, leaves):
    loss = sum((value * weight).sum() for value, weight in zip(values, weights, strict=False) if value.requires_grad)
    return torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None])


def assert_close(found, wanted, relative):
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert (one.double() - other.double()).abs().max() <= relative * max(other.abs().max(), 1e-30)


CHANGES = [{}, {"temperature": 0.6}, {"scale": 0.125, "temperature": 1.3}, {"cap": 5.0}, {"cap": 4.0, "scale": 0.5}]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("columns", [128, 192, 333, 999, 1024])  # in multiples of 64; the last holds all
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_values_and_gradients_against_all_logits(change, columns, entropy_gradient):
    leaves, targets, weights = tensors(bias=columns != 192)
    found = linear_logprobs(*leaves, targets, **change, entropy_gradient=entropy_gradient, chunk_bytes=columns * EACH)
    wanted = naive(*leaves, targets, **change)
    assert all(value.dtype == torch.float32 for value in found)
    assert found[1].requires_grad == entropy_gradient
    for value, right in zip(found, wanted, strict=True):
        assert torch.allclose(value.double(), right, rtol=1e-5, atol=1e-5)
    right = wanted if entropy_gradient else [wanted[0], wanted[1].detach()]
    assert_close(gradients(found, weights, leaves), gradients(right, weights, leaves), 1e-5)


@pytest.mark.parametrize("cap, columns", [(None, 256), (3.0, 256), (None, 128), (3.0, 128)])
def test_gradcheck(cap, columns):
    generator = torch.Generator().manual_seed(1)
    leaves = [torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((1, 3, 4), (200, 4), (200,))]
    targets = torch.tensor([[0, 130, 199]])

    def call(hidden, weight, bias):
        return linear_logprobs(hidden, weight, bias, targets, 0.7, 1.5, cap, True, chunk_bytes=12 * columns)

    leaves = [leaf.requires_grad_() for leaf in leaves]
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


def test_one_chunk_twice_through_the_same_graph():
    leaves, targets, weights = tensors()
    values = linear_logprobs(*leaves, targets, entropy_gradient=True)
    loss = (torch.stack(values) * weights).sum()
    first, second = (torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("columns", [128, 1024])
def test_bf16_weights_as_the_models_own_head(columns):
    """The matrix products in bf16 as nn.Linear has them, everything after in fp32: against the same with autograd."""
    leaves, targets, weights = tensors(torch.bfloat16)
    found = linear_logprobs(*leaves, targets, 0.6, entropy_gradient=True, chunk_bytes=columns * EACH)
    logits = nn.functional.linear(*leaves).float() / 0.6
    log_p = logits.log_softmax(-1)
    wanted = log_p.gather(-1, targets[..., None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
    for value, right in zip(found, wanted, strict=True):
        assert torch.allclose(value, right, rtol=1e-5, atol=1e-5)
    assert_close(gradients(found, weights, leaves), gradients(wanted, weights, leaves), 2**-7)


@pytest.mark.parametrize("columns", [128, 1024])
@pytest.mark.parametrize("shift", [0, -3e4, 3e4])
def test_huge_logits(columns, shift):
    """Up to 2e5 of either sign, also where all are far below 0 or above it."""
    leaves, targets, weights = tensors(loud=1.0 if shift else 1e4)
    leaves[2].data += shift
    found = linear_logprobs(*leaves, targets, 0.6, entropy_gradient=True, chunk_bytes=columns * EACH)
    for value, right in zip(found, naive(*leaves, targets, 0.6), strict=True):
        assert value.isfinite().all()
        assert (value - right).abs().max() < 2e5 * 2**-22  # a few roundings of such logits
    assert all(gradient.isfinite().all() for gradient in gradients(found, weights, leaves))


class Largest(TorchDispatchMode):
    """The most elements of any tensor that is made inside."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **kwargs or {})
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            self.numel = max(self.numel, tensor.numel() if isinstance(tensor, torch.Tensor) else 0)
        return made


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_of_all_logits(entropy_gradient, dtype):
    """All logits would be N = 37 times 40,000 numbers; the weight's gradient is 40,000."""
    _, targets, weights = tensors()
    leaves = [torch.randn(1, N, 1, dtype=dtype).requires_grad_(), torch.randn(40_000, 1, dtype=dtype).requires_grad_()]
    settings = dict(entropy_gradient=entropy_gradient, chunk_bytes=500 * EACH)
    with Largest() as mode:
        gradients(linear_logprobs(*leaves, None, targets, **settings), weights, leaves)
    assert mode.numel == 40_000
    with torch.no_grad(), Largest() as mode:
        linear_logprobs(*leaves, None, targets, **settings)
    assert mode.numel < 500 * N


VOCABULARY = 300  # three chunks of the least width


def small(model_type, **fields):
    """A tiny model of `model_type` in fp32, fields of its config set."""
    config = shrunk(default_config(model_type))
    for name, value in fields.items():
        assert hasattr(config, name), name
        setattr(config, name, value)
    config.vocab_size = VOCABULARY
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(config, dtype=torch.float32)
    gdn_packing.patch(model, packed=False)
    return slow_to_forget(model).eval()  # no dropout


def row_of(vocabulary=VOCABULARY, seed=0):
    ids = torch.randint(2, vocabulary, (2, 12), generator=torch.Generator().manual_seed(seed))
    kept = torch.tensor([2, 3, 7, 10])
    inputs = {"input_ids": ids, "logits_to_keep": kept, "use_cache": False}
    return SimpleNamespace(model_inputs=lambda: dict(inputs), kept_K=kept, targets_BK=ids[:, kept + 1])


ARCHITECTURES = {
    "llama": ({}, 1, None),
    "qwen3_5_text": ({}, 1, None),
    "qwen3_next": ({}, 1, None),
    "gpt2": ({}, 1, None),  # tied
    "phi": ({}, 1, None),  # a bias
    "bart": ({}, 1, None),  # its layers are two levels down
    "xlm": ({}, 1, None),  # its head is in a module of its own
    "trocr": ({}, 1, None),  # it does not know logits_to_keep
    "opt": ({}, 1, None),
    "mixtral": ({}, 1, None),
    "granite": ({"logits_scaling": 6.0}, 1 / 6, None),
    "granitemoehybrid": ({"logits_scaling": 8.0}, 0.125, None),
    "cohere": ({"logit_scale": 0.0625}, 0.0625, None),
    "falcon_h1": ({"lm_head_multiplier": 0.3}, 0.3, None),
    "gemma2": ({"final_logit_softcapping": 2.5}, 1, 2.5),
    "gemma3_text": ({"final_logit_softcapping": None}, 1, None),
    "nanochat": ({}, 1, 15.0),
}


def of_own_logits(model, row):
    """Logprobs and entropies at temperature 0.6, in fp64."""
    logits = model(input_ids=row.model_inputs()["input_ids"], use_cache=False).logits[:, row.kept_K]
    p = torch.distributions.Categorical(logits=logits.double() / 0.6)
    return p.log_prob(row.targets_BK), p.entropy()


def gradients_of(model, values, weights):
    sum((value * weight).sum() for value, weight in zip(values, weights, strict=True)).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("model_type", [name for name in ARCHITECTURES if name in architectures()])
def test_each_architecture_against_its_own_logits(model_type, monkeypatch):
    """Through chunks and through full logits; and nothing stays on the model."""
    fields, scale, cap = ARCHITECTURES[model_type]
    model, row, weights = small(model_type, **fields), row_of(), torch.randn(2, 2, 4)
    state = torch.get_rng_state()
    head = find_head(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert head.linear is model.get_output_embeddings(), head.description
    assert (head.scale, head.cap) == (pytest.approx(scale, rel=1e-6), cap)
    wanted = of_own_logits(model, row)
    wanted_gradients = gradients_of(model, wanted, weights)
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 1)
    for way in (head, dataclasses.replace(head, linear=None)):
        found = token_logprobs(model, row, 0.6, way, entropy_gradient=True)
        for value, right in zip(found, wanted, strict=True):
            assert value.dtype == torch.float32 and (value - right).abs().max() < 1e-5 * max(1, right.abs().max())
        for name, gradient in gradients_of(model, found, weights).items():
            right = wanted_gradients[name]
            assert (gradient - right).abs().max() <= 1e-4 * right.abs().max() + 1e-6, name
        assert not token_logprobs(model, row, 0.6, way)[1].requires_grad
        with torch.no_grad():
            for value, right in zip(token_logprobs(model, row, 0.6, way), found, strict=True):
                assert torch.equal(value, right) and not value.requires_grad
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(set(architectures()) - NEEDS_ANOTHER_MODEL - NOT_PLAIN_TEXT))
@torch.no_grad()
def test_every_architecture(model_type):
    model = tiny(model_type)
    row = row_of(min(60, model.config.get_text_config(decoder=True).vocab_size))
    gdn_packing.patch(model, packed=False)
    head = find_head(model)
    assert (head.linear is None) == (model_type in FULL_LOGITS), head.description
    for value, right in zip(token_logprobs(model, row, 0.6, head), of_own_logits(model, row), strict=True):
        assert (value - right).abs().max() < 1e-5 * max(1, right.abs().max())


class Changed(LlamaForCausalLM):
    """Does something to logits after its head."""

    change = staticmethod(lambda logits: logits)

    def forward(self, **inputs):
        output = super().forward(**inputs)
        output.logits = type(self).change(output.logits)
        return output


class DeepOnly(LlamaForCausalLM):
    def __init__(self, config):
        if config.num_hidden_layers < 4:
            raise ValueError("four layers at least")
        super().__init__(config)


class OwnLinear(nn.Linear):
    pass


CONFIG = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2
)
BIAS = torch.arange(VOCABULARY) % 7.0


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda logits: logits + BIAS[: logits.shape[-1]], "changes them after its head"),
        (lambda logits: logits * (1 + BIAS)[: logits.shape[-1]], "changes them after its head"),
        (lambda logits: logits.sign() * logits.abs().sqrt(), "changes them after its head"),
        (lambda logits: torch.nn.functional.softsign(logits / 9) * 9, "changes them after its head"),
        (lambda logits: logits.log_softmax(-1), "changes them after its head"),
        (lambda logits: logits.clamp(-50, 50), "changes them after its head"),
        (lambda logits: logits.detach(), "could not be tried"),
        (lambda logits: logits[..., :290], "could not be tried"),
        (lambda logits: logits.view(*logits.shape[:2], VOCABULARY), "could not be tried"),
    ],
)
def test_what_is_not_recognised_takes_full_logits(change, why, monkeypatch):
    monkeypatch.setattr(Changed, "change", staticmethod(change))
    head = find_head(Changed(CONFIG))
    assert head.linear is None and head.description.startswith("full logits: Changed ") and why in head.description


@pytest.mark.parametrize("change", [lambda x: 0.3 * x, lambda x: 0.3 * (x / 7).tanh() * 7, lambda x: -x.float()])
def test_what_is_recognised(change, monkeypatch):
    monkeypatch.setattr(Changed, "change", staticmethod(change))
    model, row, weights = Changed(CONFIG), row_of(), torch.randn(2, 2, 4)
    ways = [head := find_head(model), dataclasses.replace(head, linear=None)]
    assert head.linear is model.lm_head
    found, wanted = (token_logprobs(model, row, 0.6, way, entropy_gradient=True) for way in ways)
    assert_close(found, wanted, 1e-5)
    gradients_found, gradients_wanted = (gradients_of(model, each, weights) for each in (found, wanted))
    assert_close(gradients_found.values(), gradients_wanted.values(), 1e-4)


def test_heads_that_are_no_plain_linear_layer():
    hooked, other, bare = (LlamaForCausalLM(CONFIG) for _ in range(3))
    hooked.lm_head.register_forward_hook(lambda *call: call[2])
    other.lm_head = OwnLinear(64, VOCABULARY)
    bare.set_output_embeddings(None)
    for model in (hooked, other, bare):
        head = find_head(model)
        assert (head.linear, head.description) == (
            None,
            "full logits: the head of LlamaForCausalLM is no plain linear layer",
        )
    assert find_head(DeepOnly(CONFIG)).description == "full logits: DeepOnly has no tiny copy that could be tried"


def test_a_model_without_memory():
    """Neither weights nor layers of the model itself run: it may be on any device, and of any size."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=80, hidden_size=8192, vocab_size=128256))
    with torch.no_grad():
        assert find_head(model).linear is model.lm_head


def test_only_positions_that_predict_go_through_the_head():
    model, row, shapes = small("qwen3_5_text"), row_of(), []
    head = find_head(model)
    head.linear.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    token_logprobs(model, row, 1.0, head)
    assert shapes == [(2, 4, model.config.hidden_size)]


def test_an_error_in_the_model_leaves_nothing_behind():
    model, row = small("llama"), row_of()
    head = find_head(model)
    row.targets_BK = row.targets_BK[:, :3]  # of another row
    with pytest.raises(RuntimeError):
        token_logprobs(model, row, 1.0, head)
    assert "forward" not in vars(head.linear)


@pytest.mark.parametrize("model_type", ["phi", "qwen3_5_text"])
def test_autocast_as_the_models_own_head(model_type, monkeypatch):
    """fp32 weights and bf16 products, which is how accelerate runs DDP."""
    dtypes = []

    def spy(hidden_BKD, weight_VD, bias_V, *others):
        dtypes.extend(tensor.dtype for tensor in (hidden_BKD, weight_VD, bias_V) if tensor is not None)
        return linear_logprobs(hidden_BKD, weight_VD, bias_V, *others, chunk_bytes=1)

    monkeypatch.setattr(logprobs, "linear_logprobs", spy)
    model, row, weights = small(model_type), row_of(), torch.randn(2, 2, 4)
    ways = [head := find_head(model), dataclasses.replace(head, linear=None)]
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = (token_logprobs(model, row, 0.6, way, entropy_gradient=True) for way in ways)
    assert_close(found, wanted, 1e-5)
    gradients_found, gradients_wanted = (gradients_of(model, each, weights) for each in (found, wanted))
    assert_close(gradients_found.values(), gradients_wanted.values(), 0.05)  # bf16, whose sums may cancel: 0.024 seen
    assert set(dtypes) == {torch.bfloat16}  # backward, outside of autocast, makes the same logits again


RANKS = """
import dataclasses, os, sys
import torch, torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
sys.path.insert(0, sys.argv[1])
from test_logprobs import gradients_of, row_of, small
from posttrain import logprobs
from posttrain.config import FSDPConf, OptimConf, Strategy
from posttrain.training.fsdp import make_accelerator, sharding
from posttrain.logprobs import find_head, token_logprobs
from posttrain.training.optim import make_optimizer
from posttrain.command.rank import start_process_group

start_process_group(60)
rank = dist.get_rank()
logprobs.CHUNK_BYTES = 1
weights = torch.randn(2, 2, 2, 4, generator=torch.Generator().manual_seed(7))
cases = [
    (dict(model_type="gemma2", final_logit_softcapping=2.5, tie_word_embeddings=True), "full_shard", torch.float32),
    (dict(model_type="granite", logits_scaling=8.0, tie_word_embeddings=False), "full_shard", torch.bfloat16),
    (dict(model_type="qwen3_5_text", tie_word_embeddings=True), "full_shard", torch.bfloat16),
    (dict(model_type="llama", tie_word_embeddings=False), "no_shard", torch.bfloat16),
]


def difference(found, wanted):
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(found, wanted, strict=True))


for fields, strategy, dtype in cases:
    AcceleratorState._reset_state(reset_partial_state=True)  # or the second accelerator would be as the first
    GradientState._reset_state()
    alone, model = small(**fields), small(**fields)
    both = [token_logprobs(alone, row_of(seed=r), 0.6, find_head(alone), entropy_gradient=True) for r in range(2)]
    averaged = gradients_of(alone, [value / 2 for each in both for value in each], weights.flatten(0, 1))
    head = find_head(model)
    accelerator = make_accelerator(FSDPConf(strategy=Strategy(strategy)), model, dtype)
    model, _ = accelerator.prepare(model, make_optimizer(model, OptimConf()))
    assert sharding(model) == strategy and head.linear is not None
    values, gradients = [], []
    for way in (head, head, dataclasses.replace(head, linear=None)):
        found = token_logprobs(model, row_of(seed=rank), 0.6, way, entropy_gradient=True)
        values.append(found)
        found = {name.removeprefix("module."): g for name, g in gradients_of(model, found, weights[rank]).items()}
        gradients.append({name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in found.items()})
        with torch.no_grad():
            again, _ = token_logprobs(model, row_of(seed=rank), 0.6, way)
        assert torch.equal(again, values[-1][0])
    first, second, full = values
    assert all(value.dtype == torch.float32 for value in first)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert difference(first, full) < 1e-5, (fields, difference(first, full))
    exact = dtype is torch.float32
    assert (difference(first, both[rank]) < 1e-6) == exact and difference(first, both[rank]) < 0.05
    for found in gradients[:2]:
        assert found.keys() == averaged.keys()
        assert difference(found.values(), gradients[2].values()) < (1e-4 if exact else 0.05)
        assert not exact or difference(found.values(), averaged.values()) < 1e-5
dist.barrier()
print("checked", flush=True)
os._exit(0)
"""


def test_two_ranks(tmp_path):
    """FSDP2 and DDP, tied and not, capped and scaled: the numbers of full logits, and of one process."""
    script = tmp_path / "check.py"
    script.write_text(RANKS)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    process = subprocess.run(
        [*launcher, str(script), str(ROOT / "tests")], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert process.returncode == 0 and process.stdout.count("checked") == 2, process.stdout + process.stderr
