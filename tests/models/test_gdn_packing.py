"""Packed rows of the Qwen hybrids equal their documents alone, and what cannot be patched is refused."""

import importlib
import importlib.util

import pytest
import torch
from packed_models import (
    CONFIGS,
    HYBRIDS,
    alone,
    assert_same,
    assert_same_gradients,
    build,
    built,
    gradients,
    packed,
    tokens,
)
from packing_cases import BEYOND_A_CHUNK, LENGTHS, MIXED, ROWS_IN_TURN, SHORT_IN_THE_MIDDLE, TAIL_PADDING
from transformers import AutoModelForCausalLM, MambaConfig

from posttrain.errors import UserError
from posttrain.models import gdn_packing
from posttrain.models.gdn_packing import boundaries, patch
from posttrain.models.packed import dispatch

DELTA_NET_FUNCTIONS = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("name", CONFIGS)
def test_packed_equals_separate(name, lengths):
    model, ids = built(name), tokens(sum(lengths))
    one_row, apart = packed(model, ids, lengths), alone(model, ids, lengths)
    assert_same(one_row, apart)
    assert_same_gradients(gradients(model, one_row), gradients(model, apart))


@pytest.mark.parametrize("name", HYBRIDS)
@torch.no_grad()
def test_single_document_after_a_packed_row(name):
    model = built(name)
    for lengths in ROWS_IN_TURN:
        ids = tokens(sum(lengths), seed=len(lengths))
        assert_same(packed(model, ids, lengths), alone(model, ids, lengths))
        plain = model(input_ids=ids[None], use_cache=False).logits[0]  # nothing is left of the boundaries
        assert_same(plain, alone(model, ids, [len(ids)]), 0)


@torch.no_grad()
def test_order_of_documents_does_not_matter():
    parts = [tokens(length, seed=length) for length in MIXED]
    whole = packed(built("qwen3_5"), torch.cat(parts), MIXED).split(MIXED)
    for order in [(5, 4, 3, 2, 1, 0), (2, 0, 5, 1, 4, 3)]:
        lengths = [MIXED[i] for i in order]
        again = packed(built("qwen3_5"), torch.cat([parts[i] for i in order]), lengths).split(lengths)
        for i, logits in zip(order, again, strict=True):
            assert_same(logits, whole[i])


@torch.no_grad()
def test_tail_padding_is_a_document_of_its_own():
    """10 real tokens and 2048 of padding; and duplicate tail offsets (no document) from another caller."""
    model, ids = built("qwen3_5"), tokens(10)
    row = torch.cat([ids, torch.zeros(TAIL_PADDING[1], dtype=torch.long)])
    assert_same(packed(model, row, TAIL_PADDING)[:10], alone(model, ids, [10]))
    foreign = boundaries([4, 6], "cpu")
    del foreign["document_lengths"]
    foreign["cu_seq_lens_q"] = torch.tensor([0, 4, 10, 10], dtype=torch.int32)
    assert_same(model(input_ids=ids[None], **foreign).logits[0], alone(model, ids, [4, 6]))


@torch.no_grad()
def test_a_foreign_call_without_host_lengths():
    """cu_seq_lens_q or seq_idx alone are enough to know the documents, for both kernels."""
    model, ids = built("qwen3_5"), tokens(sum(SHORT_IN_THE_MIDDLE))
    expected = alone(model, ids, SHORT_IN_THE_MIDDLE)
    made = boundaries(SHORT_IN_THE_MIDDLE, "cpu")
    made["seq_idx"] = made["seq_idx"].clone()  # without the lengths that ours carries
    for missing in ("seq_idx", "document_lengths"), ("document_lengths",):
        kwargs = {k: v for k, v in made.items() if k not in missing}
        assert_same(model(input_ids=ids[None], **kwargs).logits[0], expected)


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(name, use_reentrant):
    lengths = BEYOND_A_CHUNK
    ids = tokens(sum(lengths))
    model = build(name)
    expected = gradients(model, alone(model, ids, lengths))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.train().enable_input_require_grads()
    one_row = packed(model, ids, lengths)
    packed(model, tokens(80, seed=3), (40, 40))  # a later row must not reach the recomputation of the first
    assert_same_gradients(gradients(model, one_row), expected)


@pytest.mark.parametrize("name", HYBRIDS)
@torch.no_grad()
def test_padded_batch_equals_alone(name):
    model, lengths = built(name), (3, 65, 20)
    parts = tokens(sum(lengths)).split(lengths)
    ids = torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
    mask = (torch.arange(65) < torch.tensor(lengths)[:, None]).long()
    positions = torch.arange(65).expand(3, -1)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    for row, part in zip(logits, parts, strict=True):
        assert_same(row[: len(part)], alone(model, part, [len(part)]))


@pytest.mark.parametrize("name", HYBRIDS)
@torch.no_grad()
def test_decoding_with_a_cache_equals_the_full_forward(name):
    model, ids = built(name), tokens(24).view(2, 12)
    full = model(input_ids=ids, use_cache=False).logits
    for prompt in (1, 2, 7):  # also prompts shorter than the convolution
        step = model(input_ids=ids[:, :prompt], use_cache=True)
        logits = [step.logits]
        for position in range(prompt, 12):
            cache = step.past_key_values
            step = model(input_ids=ids[:, position : position + 1], past_key_values=cache, use_cache=True)
            logits.append(step.logits)
        assert_same(torch.cat(logits, 1), full)


def test_generation_in_inference_mode_then_training():
    """Plans are cached across calls; one made in inference mode must be usable by autograd."""
    model, lengths, ids = built("qwen3_5"), (7, 9, 3), tokens(19)
    with torch.inference_mode():
        packed(model, ids, lengths)
        model.generate(ids[None, :7], max_new_tokens=2, do_sample=False)
    assert_same_gradients(gradients(model, packed(model, ids, lengths)), gradients(model, alone(model, ids, lengths)))


@pytest.fixture
def module():
    """The modeling module of dense qwen3_5, patched, to be broken with monkeypatch."""
    built("qwen3_5")
    return importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")


def test_patch_is_idempotent_and_reports(module):
    before = {name: getattr(module, name) for name in DELTA_NET_FUNCTIONS}
    report = patch(built("qwen3_5"))
    assert report == patch(built("qwen3_5"))
    assert all(getattr(module, name) is function for name, function in before.items())
    assert report.layers == {"Qwen3_5GatedDeltaNet": 3} and not report.warnings
    assert report.kernels["gated_delta_rule"] == report.kernels["causal_conv1d"] == "reference (torch)"


def test_attention_only_needs_no_patch():
    report = patch(built("llama"))
    assert report.layers == {} and set(report.kernels) == {"attention"}


def test_a_model_that_cannot_be_packed_is_refused_by_name():
    model = AutoModelForCausalLM.from_config(MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=32))
    with pytest.raises(UserError, match=r"MambaForCausalLM.*MambaMixer.*packing=padded"):
        patch(model)
    assert patch(model, packed=False).layers == {"MambaMixer": 1}


@pytest.mark.parametrize("version", ["4.57.1", "5.14.2", "6.0.0"])
def test_other_versions_of_transformers_are_refused(monkeypatch, version):
    # transformers runs its own __init__ a second time while it imports itself, so there may be two modules of its name.
    monkeypatch.setattr(gdn_packing.transformers, "__version__", version)
    with pytest.raises(UserError, match=rf"transformers {version} is installed.*>=5.15,<6"):
        patch(built("qwen3_5"))


def test_hub_kernels_are_refused(monkeypatch):
    monkeypatch.setattr(type(built("qwen3_5")), "use_kernels", True)
    with pytest.raises(UserError, match="use_kernels=True.*Qwen3_5GatedDeltaNet"):
        patch(built("qwen3_5"))


def test_a_slow_reference_on_a_gpu_is_a_warning_that_says_what_to_install(monkeypatch):
    """The device is that of the computation, not of the parameters, which may still be on the host."""
    # As on a GPU for which no package with fused kernels is installed.
    monkeypatch.setattr(dispatch, "FUSED_ON", set())
    model = built("qwen3_5")
    assert patch(model, "cuda").warnings == [
        "gated_delta_rule runs its slow reference on cuda: pip install flash-linear-attention",
        "causal_conv1d runs its slow reference on cuda: pip install causal-conv1d",
    ]
    assert patch(model).warnings == patch(model, "cpu").warnings == []
