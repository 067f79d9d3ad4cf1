"""Attention by document and the call around it: no waiting for the device, no mask of the row, no other boundaries."""

import pytest
import torch
from architecture_cases import STATEFUL, known, patched
from packed_models import alone, difference, packed, tokens
from packing_cases import MIXED
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from posttrain.errors import UserError
from posttrain.models.architectures import tiny
from posttrain.models.gdn_packing import boundaries, patch
from posttrain.models.packed.attention import SLICE, attention_by_document, causal_mask


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
def test_the_host_never_waits_inside_the_model(name):
    """In the second call with the same lengths: the first makes index plans on the host."""
    model, ids = patched(name), tokens(sum(MIXED))
    inputs = boundaries(MIXED, "cpu")
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
def test_no_mask_of_the_whole_row_is_made(name):
    model, ids = patched(name), tokens(sum(MIXED))
    with Watch() as watch:
        packed(model, ids, MIXED)
    assert watch.booleans < sum(MIXED) ** 2


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", known(["llama", "qwen3_5_text", "gemma3_text", "granitemoehybrid"]))
@torch.no_grad()
def test_each_attention_and_longer_documents_than_its_window(name, attention):
    model = patched(name)
    before = model.config._attn_implementation
    model.set_attn_implementation(attention)
    try:
        assert max(MIXED) > (getattr(model.config, "sliding_window", None) or 0)
        ids = tokens(sum(MIXED))
        assert difference(packed(model, ids, MIXED), alone(model, ids, MIXED)) < 3e-5
        assert patch(model).kernels["attention"] == f"{attention} by document"
    finally:
        model.set_attn_implementation(before)


@torch.no_grad()
def test_masks_and_positions_of_other_callers():
    """An all-ones mask beside the boundaries; position_ids alone, on attention, as without the patch."""
    model, ids = patched("llama"), tokens(30)
    wanted = alone(model, ids, (13, 17))
    ones = torch.ones(1, 30, dtype=torch.long)
    assert difference(packed(model, ids, (13, 17), attention_mask=ones), wanted) < 3e-5
    hybrid = patched("qwen3_5_text")
    assert difference(packed(hybrid, ids, (13, 17), attention_mask=ones), alone(hybrid, ids, (13, 17))) < 3e-5
    positions = boundaries((13, 17), "cpu")["position_ids"]
    logits = model(input_ids=ids[None], position_ids=positions, use_cache=False).logits[0]
    assert difference(logits, wanted) < 3e-5


@pytest.mark.parametrize("name", known(["llama", "qwen3_5_text"]))
def test_boundaries_of_another_row_are_refused(name):
    """A collator that pads the row after the boundaries were made; lengths in another order; a cache."""
    model, ids = patched(name), tokens(64)
    short = boundaries((13, 17), "cpu")
    padded = torch.nn.functional.pad(short["seq_idx"], (0, 34), value=1)
    positions = torch.arange(64)[None]
    with pytest.raises(ValueError, match="must fill one row.*padding included"):
        model(input_ids=ids[None], **short | {"seq_idx": padded, "position_ids": positions})
    with pytest.raises(ValueError, match="those of seq_idx"):
        model(input_ids=ids[None, :30], **short | {"document_lengths": (17, 13)})
    with pytest.raises(ValueError, match="use_cache=False"):
        model(input_ids=ids[None, :30], **short | {"use_cache": True})
    with pytest.raises(ValueError, match="use_cache=False"):
        model(input_ids=ids[None, :30], past_key_values=DynamicCache(config=model.config), **short)


def test_a_failed_call_leaves_no_boundaries_behind():
    model, ids = patched("llama"), tokens(30)
    with pytest.raises(IndexError):
        packed(model, ids + 10_000, (13, 17))
    with torch.no_grad():
        plain = model(input_ids=ids[None], use_cache=False).logits[0]
        assert difference(plain[:13], packed(model, ids, (13, 17))[:13]) < 3e-5
        assert difference(plain[13:], packed(model, ids, (13, 17))[13:]) > 1e-2  # one document attends to all


def test_a_compiled_model_is_refused():
    model = tiny("llama")
    with pytest.raises(UserError, match="compiled model.*Compile it afterwards"):
        patch(torch.compile(model, backend="eager"))
    model.compile(backend="eager")
    with pytest.raises(UserError, match="compiled model"):
        patch(model)


@pytest.mark.parametrize("with_mask", [False, True])
def test_a_bias_of_positions_is_cut_to_each_document(with_mask):
    """As T5's relative positions are: [1, H, T, T] of the row; a mask of the row beside it is cut too."""

    def attention(module, query, key, value, attention_mask=None, position_bias=None, **kwargs):
        scores = query @ key.transpose(2, 3) + position_bias
        scores = scores if attention_mask is None else scores + attention_mask
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    query, key, value = torch.randn(3, 1, 2, 9, 4)
    bias = torch.randn(1, 2, 9, 9)
    mask = torch.randn(1, 1, 9, 9) if with_mask else None
    module = torch.nn.Identity()
    found, _ = attention_by_document(attention)(
        module, query, key, value, mask, position_bias=bias, document_lengths=(4, 5)
    )
    wanted = []
    for where in (slice(0, 4), slice(4, 9)):
        own = None if mask is None else mask[..., where, where]
        parts = (x[:, :, where] for x in (query, key, value))
        wanted.append(attention(module, *parts, own, position_bias=bias[..., where, where])[0])
    assert torch.allclose(found, torch.cat(wanted, 1), atol=1e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", known(["gpt_oss", "gemma2", "gemma3_text", "olmo3", "cohere2", "qwen3"]))
def test_slices_of_queries_change_nothing(monkeypatch, name, attention):
    """Windows, sinks and caps of logits: documents of many slices equal themselves alone, without the patch."""
    model = tiny(name)
    if name in ("gpt_oss", "gemma2") and attention == "sdpa":
        # Sinks, and caps of logits: they have eager attention only.
        attention = "eager"
    model.set_attn_implementation(attention)
    ids = tokens(90)
    wanted = alone(model, ids, (70, 20))
    patch(model)
    whole = packed(model, ids, (70, 20))
    monkeypatch.setattr("posttrain.models.packed.attention.SLICE", 8)
    sliced = packed(model, ids, (70, 20))
    assert difference(sliced, wanted) < 3e-5 and difference(sliced, whole) < 1e-5


def eager_with_sinks(module, query, key, value, attention_mask=None, scaling=1.0, sliding_window=None, **kwargs):
    """As gpt_oss does: one more logit a head, which takes probability and has no value."""
    scores = query @ key.transpose(2, 3) * scaling + attention_mask
    sinks = module.sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return (weights @ value).transpose(1, 2), None


@pytest.mark.parametrize("window", [None, 100])
def test_a_long_document_has_no_mask_of_its_length_squared(window):
    """At L = 8192, with sinks: a mask has the rows of one slice, and two masks are kept, however many lengths come."""
    module = torch.nn.Module()
    module.sinks = torch.zeros(1)
    attention, length = attention_by_document(eager_with_sinks, additive=True), 8192
    causal_mask.cache_clear()

    def run(length):
        q, k, v = torch.randn(3, 1, 1, length + 3, 4)
        lengths = (length, 3)
        return (q, k, v), attention(module, q, k, v, sliding_window=window, document_lengths=lengths)[0]

    with Largest() as seen, torch.no_grad():
        (q, k, v), found = run(length)
    keys = length if window is None else SLICE + window - 1
    # Scores of one slice with the sink, and nothing larger.
    assert seen.numbers <= SLICE * (keys + 1)
    for first in (0, SLICE - 1, SLICE, 5000, length - 1):
        start = 0 if window is None else max(0, first - window + 1)
        scores = torch.cat([q[0, 0, first] @ k[0, 0, start : first + 1].T, torch.zeros(1)])
        wanted = scores.softmax(-1)[:-1] @ v[0, 0, start : first + 1]
        torch.testing.assert_close(found[0, first, 0], wanted, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        for shorter in range(1500, 1520):
            run(shorter)
    assert causal_mask.cache_info().currsize <= 2


class Largest(TorchDispatchMode):
    """The largest number of values in a tensor that an operation made."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // tensor.element_size())
        return made
