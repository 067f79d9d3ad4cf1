"""Every architecture that packs: a row equals its documents alone, whatever ran before.

Tiny random models with slow decay (`architectures.tiny`), fp32 on the CPU unless said.
"""

import pytest
import torch
from architecture_cases import ATTENTION_ONLY, STATEFUL, known, patched
from packed_models import alone, assert_same_gradients, difference, gradients, packed, tokens
from packing_cases import BEYOND_A_CHUNK, MIXED, ROWS_IN_TURN

from posttrain.models.architectures import tiny
from posttrain.models.gdn_packing import patch


@pytest.mark.parametrize("name", known([*STATEFUL, *ATTENTION_ONLY]))
def test_packed_equals_separate(name):
    model, ids = patched(name), tokens(sum(MIXED))
    one_row, apart = packed(model, ids, MIXED), alone(model, ids, MIXED)
    assert difference(one_row, apart) < 3e-5
    assert_same_gradients(gradients(model, one_row), gradients(model, apart))


@pytest.mark.parametrize("name", known([*STATEFUL, "llama", "gemma3_text", "gpt_oss"]))
@torch.no_grad()
def test_no_state_is_left_whatever_the_order_of_rows(name):
    model = patched(name)
    for lengths in ROWS_IN_TURN:
        ids = tokens(sum(lengths), seed=len(lengths))
        plain = model(input_ids=ids[None], use_cache=False).logits[0]
        assert difference(packed(model, ids, lengths), alone(model, ids, lengths)) < 3e-5
        assert torch.equal(model(input_ids=ids[None], use_cache=False).logits[0], plain)


@pytest.mark.parametrize("name", known(STATEFUL))
@torch.no_grad()
def test_decoding_with_a_cache_equals_the_full_forward(name):
    model, ids = patched(name), tokens(20).view(2, 10)
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
def test_padded_batch_equals_alone(name):
    model, lengths = patched(name), (3, 65, 20)
    parts = tokens(sum(lengths)).split(lengths)
    ids = torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
    mask = (torch.arange(65) < torch.tensor(lengths)[:, None]).long()
    logits = model(input_ids=ids, attention_mask=mask, position_ids=torch.arange(65).expand(3, -1), use_cache=False)
    for row, part in zip(logits.logits, parts, strict=True):
        assert difference(row[: len(part)], alone(model, part, [len(part)])) < 1e-4


@pytest.mark.parametrize("name", known(["kimi_linear", "bamba", "lfm2", "olmo_hybrid", "gpt_oss", "gemma3_text"]))
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(name, use_reentrant):
    lengths, model = BEYOND_A_CHUNK, tiny(name)
    patch(model)
    ids = tokens(sum(lengths))
    wanted = gradients(model, alone(model, ids, lengths))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.train().enable_input_require_grads()
    one_row = packed(model, ids, lengths)
    packed(model, tokens(80, seed=3), (40, 40))  # a later row must not reach the recomputation of the first
    assert_same_gradients(gradients(model, one_row), wanted)
