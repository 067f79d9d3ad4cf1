"""Every architecture that packs: a row equals its documents alone, whatever ran before; and every other is refused.

Tiny random models with slow decay (`architectures.tiny`), fp32 on the CPU unless said.
"""

import importlib

import pytest
import torch
import transformers
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from posttrain.errors import UserError
from posttrain.models.architectures import tiny
from posttrain.models.gdn_packing import PackingLeak, boundaries, patch, verify
from posttrain.models.packed import dispatch, kernels
from posttrain.models.packed.boundaries import BOUNDARIES, documents
from posttrain.models.packed.layers import carried

DOCUMENTS = (1, 2, 13, 17, 64, 65)
STATEFUL = {  # what carries a state along the row
    "qwen3_5_text": "gated delta rule",
    "qwen3_5_moe_text": "gated delta rule",
    "qwen3_next": "gated delta rule",
    "olmo_hybrid": "gated delta rule",
    "qwen4_exp_text": "gated delta rule",
    "kimi_linear": "Kimi delta attention",
    "bailing_hybrid": "Kimi delta attention",
    "nemotron_h": "Mamba-2",
    "bamba": "Mamba-2",
    "falcon_h1": "Mamba-2",
    "granitemoehybrid": "Mamba-2",
    "zamba2": "Mamba-2",
    "lfm2": "short convolution",
    "lfm2_moe": "short convolution",
}
ATTENTION_ONLY = [
    "llama", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3", "olmo2",
    "phi3", "gpt2", "opt", "glm4_moe", "llama4_text", "stablelm",
]  # fmt: skip
REFUSED = {  # and the layer class at fault
    "mamba": "MambaMixer",
    "mamba2": "Mamba2Mixer",
    "falcon_mamba": "FalconMambaMixer",
    "jamba": "JambaMambaMixer",
    "zamba": "ZambaMambaMixer",
    "recurrent_gemma": "RecurrentGemmaRecurrentBlock",
    "inkling_text": "InklingShortConvolution",
    "minimax": "MiniMaxLightningAttention",
    "rwkv": "RwkvForCausalLM",
    "bloom": "BloomAttention",
}


SINCE = {"nemotron_h": "5.17", "falcon_h1": "5.17", "llama4_text": "5.20"}  # before, the probe refuses them


def known(names):
    """Those that pack in the installed transformers."""
    installed = Version(transformers.__version__)
    old = pytest.mark.skip(reason="not in this version of transformers, or refused there")
    return [
        name
        if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and installed >= Version(SINCE.get(name, "5.15"))
        else pytest.param(name, marks=old)
        for name in names
    ]


KIMI = pytest.mark.skipif("kimi_linear" not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, reason="not in this version")


@pytest.fixture(scope="module")
def models():
    """name -> the patched tiny model, made once."""
    made = {}

    def model(name):
        if name not in made:
            made[name] = tiny(name)
            patch(made[name])
        return made[name]

    return model


def tokens(count, seed=0):
    return torch.randint(5, 60, (count,), generator=torch.Generator().manual_seed(seed))


def packed(model, ids, lengths, **more):
    return model(input_ids=ids[None], **boundaries(lengths, "cpu"), **more).logits[0]


def alone(model, ids, lengths):
    """Each document in its own ordinary call, without boundaries."""
    return torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in ids.split(list(lengths))])


def difference(found, wanted):
    assert found.isfinite().all()
    return float((found - wanted).detach().abs().max() / wanted.detach().abs().max())


def gradients(model, logits):
    target = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    made = torch.autograd.grad((logits * target).sum(), list(trained.values()), materialize_grads=True)
    return dict(zip(trained, made, strict=True))


def assert_same_gradients(found, wanted):
    """Some are zero but for rounding: measured by the largest of all."""
    floor = 0.01 * max(gradient.abs().max() for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert (found[name] - gradient).abs().max() <= 1e-4 * max(gradient.abs().max(), floor), name


# ------------------------------------------------------------------------------------- the whole model


@pytest.mark.parametrize("name", known([*STATEFUL, *ATTENTION_ONLY]))
def test_packed_equals_separate(models, name):
    model, ids = models(name), tokens(sum(DOCUMENTS))
    one_row, apart = packed(model, ids, DOCUMENTS), alone(model, ids, DOCUMENTS)
    assert difference(one_row, apart) < 3e-5
    assert_same_gradients(gradients(model, one_row), gradients(model, apart))


@pytest.mark.parametrize("name", known([*STATEFUL, "llama", "gemma3_text", "gpt_oss"]))
@torch.no_grad()
def test_no_state_is_left_whatever_the_order_of_rows(models, name):
    model = models(name)
    for lengths in [(10, 20), (17,), (30,), (13, 17), (64,), (1,) * 30, (10, 20)]:
        ids = tokens(sum(lengths), seed=len(lengths))
        plain = model(input_ids=ids[None], use_cache=False).logits[0]
        assert difference(packed(model, ids, lengths), alone(model, ids, lengths)) < 3e-5
        assert torch.equal(model(input_ids=ids[None], use_cache=False).logits[0], plain)


@pytest.mark.parametrize("name", known(STATEFUL))
@torch.no_grad()
def test_decoding_with_a_cache_equals_the_full_forward(models, name):
    model, ids = models(name), tokens(20).view(2, 10)
    full = model(input_ids=ids, use_cache=False).logits
    step = model(input_ids=ids[:, :6], use_cache=True)
    logits = [step.logits]
    for position in range(6, 10):
        step = model(
            input_ids=ids[:, position : position + 1],
            position_ids=torch.full((2, 1), position),
            past_key_values=step.past_key_values,
            use_cache=True,
        )
        logits.append(step.logits)
    assert difference(torch.cat(logits, 1), full) < 1e-4


@pytest.mark.parametrize("name", known(STATEFUL))
@torch.no_grad()
def test_padded_batch_equals_alone(models, name):
    model, lengths = models(name), (3, 65, 20)
    parts = tokens(sum(lengths)).split(lengths)
    ids = torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
    mask = (torch.arange(65) < torch.tensor(lengths)[:, None]).long()
    logits = model(input_ids=ids, attention_mask=mask, position_ids=torch.arange(65).expand(3, -1), use_cache=False)
    for row, part in zip(logits.logits, parts, strict=True):
        assert difference(row[: len(part)], alone(model, part, [len(part)])) < 1e-4


@pytest.mark.parametrize("name", known(["kimi_linear", "bamba", "lfm2", "olmo_hybrid", "gpt_oss", "gemma3_text"]))
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(name, use_reentrant):
    lengths, model = (13, 2, 65), tiny(name)
    patch(model)
    ids = tokens(sum(lengths))
    wanted = gradients(model, alone(model, ids, lengths))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.train().enable_input_require_grads()
    one_row = packed(model, ids, lengths)
    packed(model, tokens(80, seed=3), (40, 40))  # a later row must not reach the recomputation of the first
    target = torch.randn(one_row.shape, generator=torch.Generator().manual_seed(5))
    (one_row * target).sum().backward()  # reentrant checkpointing works with backward only
    assert_same_gradients({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, wanted)


# ------------------------------------------------------------------------------------------- the probe


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", known([*STATEFUL, *ATTENTION_ONLY]))
def test_probe_passes(models, name, dtype):
    proof = verify(models(name), dtype=dtype)
    assert proof.max_difference < proof.tolerance / 2
    assert proof.max_gradient_difference < proof.gradient_tolerance / 2


@pytest.mark.parametrize("name", known(REFUSED))
def test_what_cannot_be_right_is_refused_by_name(name):
    model = tiny(name)
    with pytest.raises(UserError, match=rf"packing=thd.*{REFUSED[name]}.*packing=padded"):
        patch(model)
        verify(model)
    patch(model, packed=False)  # chooses kernels only


def without_boundaries(function):
    def leaking(*args, **kwargs):
        return function(*args, **{k: v for k, v in kwargs.items() if k not in BOUNDARIES})

    leaking.kernel_for = function.kernel_for
    return leaking


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name, function, layer",
    [
        pytest.param("kimi_linear", "chunk_kimi_delta_attention", "KimiLinearDeltaAttention", marks=KIMI),
        pytest.param("kimi_linear", "causal_conv1d_fn", "KimiLinearDeltaAttention", marks=KIMI),
        ("bamba", "mamba2_chunk_scan", "BambaMixer"),
        ("bamba", "causal_conv1d_fn", "BambaMixer"),
        ("lfm2", "causal_conv1d_fn", "Lfm2ShortConv"),
        ("olmo_hybrid", "torch_chunk_gated_delta_rule", "OlmoHybridGatedDeltaNet"),
    ],
)
def test_probe_catches_boundaries_dropped_for_one_function(models, monkeypatch, name, function, layer, dtype):
    model = models(name)
    module = importlib.import_module(type(model).__module__)
    monkeypatch.setattr(module, function, without_boundaries(getattr(module, function)))
    with pytest.raises(PackingLeak, match=rf"({layer} leaks|no boundaries reach .* of {layer}).*packing=padded"):
        verify(model, dtype=dtype)


@pytest.mark.parametrize("documents_kept_apart", [0, 4], ids=["none", "all_but_the_last_two"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", known([name for name, what in STATEFUL.items() if what == "Mamba-2"]))
def test_probe_catches_a_scan_that_ignores_its_boundaries(models, monkeypatch, name, dtype, documents_kept_apart):
    """They arrive, so counting them shows nothing; and the state is a small part of what these layers put out."""
    model, genuine = models(name), kernels.state_space_scan

    def merging(raw, x, dt, A, B, C, chunk, lengths, **kwargs):
        lengths = (*lengths[:documents_kept_apart], sum(lengths[documents_kept_apart:]))
        return genuine(raw, x, dt, A, B, C, chunk, lengths, **kwargs)

    monkeypatch.setattr(kernels, "state_space_scan", merging)
    with pytest.raises(PackingLeak, match="leaks between documents"):
        verify(model, dtype=dtype)


def test_probe_wants_boundaries_at_every_stateful_layer(models, monkeypatch):
    """A convolution that happens to be right for these documents, but was never told of them."""
    model = models("lfm2")
    module = importlib.import_module(type(model).__module__)

    def by_luck(x, weight, bias=None, activation=None, **kwargs):
        lengths = documents(kwargs, 1, x.shape[2]) or (x.shape[2],)
        return kernels.causal_conv1d(x, weight, bias, activation, lengths)

    by_luck.kernel_for = module.causal_conv1d_fn.kernel_for
    monkeypatch.setattr(module, "causal_conv1d_fn", by_luck)
    with pytest.raises(PackingLeak, match="no boundaries reach the convolution of Lfm2ShortConv"):
        verify(model)


@pytest.mark.parametrize("name", known(STATEFUL))
def test_every_stateful_layer_is_known(models, name):
    """By the functions of its file: each layer class that calls one of them carries what the function carries."""
    model = models(name)
    found = set().union(*carried(model).values())
    module = importlib.import_module(type(model).__module__)
    offered = {what for f, operation in dispatch.OPERATIONS.items() if hasattr(module, f) for what in operation.carries}
    assert found == offered


# ----------------------------------------------------------------------------- synchronisation and masks


class Watch(TorchDispatchMode):
    """Lists operations that would make the host wait for a device, and the largest number of booleans in a tensor."""

    WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "is_nonzero", "equal"}

    def __init__(self):
        super().__init__()
        self.waits, self.booleans = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "_index_put_impl_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in self.WAITS or by_mask:
            self.waits.append(name)
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype is torch.bool:
            self.booleans = max(self.booleans, result.numel())
        return result


NEVER_WAIT = [*STATEFUL, "llama", "qwen3_moe", "gemma3_text", "gpt_oss", "deepseek_v3"]
NEVER_WAIT.remove("qwen4_exp_text")  # its own sparse attention does


@pytest.mark.parametrize("name", known(NEVER_WAIT))
@torch.no_grad()
def test_the_host_never_waits_inside_the_model(models, name):
    """In the second call with the same lengths: the first makes index plans on the host."""
    model, ids = models(name), tokens(sum(DOCUMENTS))
    inputs = boundaries(DOCUMENTS, "cpu")
    model(input_ids=ids[None], **inputs)
    with Watch() as watch:
        model(input_ids=ids[None], **inputs)
    assert watch.waits == []


def test_the_watch_sees_a_wait():
    with Watch() as watch:
        x = torch.arange(4)
        x[x > 1], bool(x.sum() > 3), x.nonzero()
    assert set(watch.waits) == {"index", "_local_scalar_dense", "nonzero"}


@pytest.mark.parametrize(
    "name", known(["llama", "qwen3_5_text", "granitemoehybrid", "gpt2", "gemma3_text", "gpt_oss", "mistral"])
)
@torch.no_grad()
def test_no_mask_of_the_whole_row_is_made(models, name):
    model, ids = models(name), tokens(sum(DOCUMENTS))
    with Watch() as watch:
        packed(model, ids, DOCUMENTS)
    assert watch.booleans < sum(DOCUMENTS) ** 2


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", known(["llama", "qwen3_5_text", "gemma3_text", "granitemoehybrid"]))
@torch.no_grad()
def test_each_attention_and_longer_documents_than_its_window(models, name, attention):
    model = models(name)
    before = model.config._attn_implementation
    model.set_attn_implementation(attention)
    try:
        assert max(DOCUMENTS) > (getattr(model.config, "sliding_window", None) or 0)
        ids = tokens(sum(DOCUMENTS))
        assert difference(packed(model, ids, DOCUMENTS), alone(model, ids, DOCUMENTS)) < 3e-5
        assert patch(model).kernels["attention"] == f"{attention} by document"
    finally:
        model.set_attn_implementation(before)


@torch.no_grad()
def test_masks_and_positions_of_other_callers(models):
    """An all-ones mask beside the boundaries; position_ids alone, on attention, as without the patch."""
    model, ids = models("llama"), tokens(30)
    wanted = alone(model, ids, (13, 17))
    ones = torch.ones(1, 30, dtype=torch.long)
    assert difference(packed(model, ids, (13, 17), attention_mask=ones), wanted) < 3e-5
    hybrid = models("qwen3_5_text")
    assert difference(packed(hybrid, ids, (13, 17), attention_mask=ones), alone(hybrid, ids, (13, 17))) < 3e-5
    positions = boundaries((13, 17), "cpu")["position_ids"]
    logits = model(input_ids=ids[None], position_ids=positions, use_cache=False).logits[0]
    assert difference(logits, wanted) < 3e-5


@pytest.mark.parametrize("name", known(["llama", "qwen3_5_text"]))
def test_boundaries_of_another_row_are_refused(models, name):
    """A collator that pads the row after the boundaries were made; lengths in another order; a cache."""
    model, ids = models(name), tokens(64)
    short = boundaries((13, 17), "cpu")
    padded = torch.nn.functional.pad(short["seq_idx"], (0, 34), value=1)
    positions = torch.arange(64)[None]
    with pytest.raises(ValueError, match="must fill one row.*padding included"):
        model(input_ids=ids[None], **short | {"seq_idx": padded, "position_ids": positions})
    with pytest.raises(ValueError, match="those of seq_idx"):
        model(input_ids=ids[None, :30], **short | {"document_lengths": (17, 13)})
    with pytest.raises(ValueError, match="use_cache=False"):
        model(input_ids=ids[None, :30], **short | {"use_cache": True})


def test_a_failed_call_leaves_no_boundaries_behind(models):
    model, ids = models("llama"), tokens(30)
    with pytest.raises(IndexError):
        packed(model, ids + 10_000, (13, 17))
    with torch.no_grad():
        plain = model(input_ids=ids[None], use_cache=False).logits[0]
        assert difference(plain[:13], packed(model, ids, (13, 17))[:13]) < 3e-5
        assert difference(plain[13:], packed(model, ids, (13, 17))[13:]) > 1e-2  # one document attends to all


def test_a_compiled_model_is_refused(models):
    model = tiny("llama")
    with pytest.raises(UserError, match="compiled model.*Compile it afterwards"):
        patch(torch.compile(model, backend="eager"))
    model.compile(backend="eager")
    with pytest.raises(UserError, match="compiled model"):
        patch(model)
