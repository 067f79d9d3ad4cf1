"""From the cost of a token, a logit and a pair to the cost of documents and rollouts."""

import pytest
from flop_cases import build

from posttrain.flops import Chunk, PassCost, causal_pairs, size


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_moe_text", "gpt_oss"])
def test_packed_documents_are_billed_each_on_its_own(family):
    counter, lengths = size(build(family, device="meta")), [1, 33, 500, 7]
    alone = sum(counter.forward([length], length) for length in lengths)
    assert counter.forward(lengths, sum(lengths)) == alone
    assert counter.forward([sum(lengths)], sum(lengths)) > alone


@pytest.mark.parametrize("window", [None, 1, 5, 1000])
def test_causal_pairs(window):
    lengths = [0, 1, 4, 5, 6, 50]
    seen = [
        1 for length in lengths for query in range(length) for key in range(length)
        if key <= query and (window is None or query - key < window)
    ]  # fmt: skip
    assert causal_pairs(lengths, window) == len(seen)


def test_causal_pairs_within_chunks():
    lengths = [0, 1, 4, 5, 6, 50]
    seen = [1 for n in lengths for query in range(n) for key in range(query + 1) if query // 5 == key // 5]
    assert causal_pairs(lengths, Chunk(5)) == len(seen)


def test_rollout_feeds_all_but_the_last_token():
    counter = size(build("qwen3", device="meta"))
    alone = counter.rollout([(10, [4]), (3, [1])])
    assert alone == pytest.approx(counter.forward([13, 3], 5))
    shared = counter.rollout([(10, [4, 4])])  # the prompt and its last position's logits are computed once
    assert shared == pytest.approx(2 * counter.rollout([(10, [4])]) - counter.forward([10], 1))


def test_an_empty_cost():
    assert PassCost()([5, 6], 7) == 0
