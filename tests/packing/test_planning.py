"""Which document goes where: each once, few rows, equal ranks."""

import math
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packing_cases import conf as any_conf

from posttrain.config import PackingConf
from posttrain.flops import PassCost, size
from posttrain.models.architectures import tiny
from posttrain.packing import planning
from posttrain.records import Document, Rollout

COST = PassCost(per_token=7.2e9, per_logit=0.8e9, per_pair={None: 4e5, 512: 2e5})  # of a 4B model
BUDGET = 4096


def document(prompt: int, completion: int, index: int = 0) -> Document:
    """Only its lengths matter here."""
    rollout = Rollout.one_turn(
        prompt_ids=(1,) * prompt,
        completion_ids=(2,) * completion,
        logprobs=(-1.0,) * completion,
        finish_reason="stop",
        group=0,
    )
    return Document(rollout=rollout, advantage=1.0, weight=1.0, index=index)


SPARE = planning.spare(document(9, 9).rollout)


def conf(mode: str = "thd", budget: int = BUDGET, multiple: int = 1) -> PackingConf:
    return any_conf(mode, budget, multiple)


def draw(mix: str, count: int, seed: int = 0) -> list[Document]:
    generator = random.Random(f"{mix} {seed}")
    length = {
        "log-normal": lambda: generator.lognormvariate(6.2, 1),
        "bimodal": lambda: generator.gauss(300, 60) if generator.random() < 0.5 else generator.gauss(3000, 400),
        "uniform": lambda: generator.uniform(8, BUDGET),
    }[mix]
    lengths = [min(BUDGET, max(8, int(length()))) for _ in range(count)]
    return [document(n // 4, n - n // 4, index) for index, n in enumerate(lengths)]


def flops(document: Document, cost: PassCost = COST) -> float:
    """Of one document, query by query."""
    tokens = len(document)
    pairs = sum(
        flops * sum(min(position, window or tokens) for position in range(1, tokens + 1))
        for window, flops in cost.per_pair.items()
    )
    return cost.per_token * tokens + cost.per_logit * document.rollout.trained_tokens + pairs


def least_rows(documents: list[Document], budget: int = BUDGET) -> int:
    """Martello and Toth's L2: documents of more than half a budget never share a row, nor do they with ones of `small`
    or more where the two exceed the budget; what then remains needs room.
    """
    bounds = []
    for small in range(0, budget // 2, budget // 64):
        alone = sum(len(d) > budget - small for d in documents)
        large = [len(d) for d in documents if budget / 2 < len(d) <= budget - small]
        rest = sum(len(d) for d in documents if small <= len(d) <= budget / 2)
        bounds.append(alone + len(large) + max(0, math.ceil((rest + sum(large)) / budget - len(large))))
    return max(bounds)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=40),
    st.integers(1, 8),
    st.sampled_from(["thd", "padded"]),
    st.integers(1, 150),
    st.sampled_from([1, 8]),
)
@example([(5, 5)] * 9, 4, "thd", 10, 1)  # rows without any room left
def test_every_document_once_and_equal_counts(shapes, ranks, mode, budget, multiple):
    documents = [document(*shape, index=n) for n, shape in enumerate(shapes)]
    cfg = conf(mode, budget, multiple)
    plan = planning.plan(documents, SPARE, cfg, ranks, COST)
    assert len(plan) == ranks and len({len(share) for share in plan}) == 1
    placed = [d.index for share in plan for row in share for d in row if d is not SPARE]
    assert sorted(placed) == list(range(len(documents)))
    for row in (row for share in plan for row in share if len(row) > 1):
        assert budget >= (sum(map(len, row)) if mode == "thd" else len(row) * max(map(len, row)))
    assert planning.plan(documents, SPARE, cfg, ranks, COST) == plan  # what another rank computes
    found = planning.statistics([plan], cfg, COST)
    assert 0 < found["packing/fill"] <= 1 <= found["packing/rank_imbalance"] * (1 + 1e-12)


def test_a_batch_smaller_than_the_ranks_is_filled_up_with_weight_zero():
    plan = planning.plan([document(5, 5, n) for n in range(3)], SPARE, conf(budget=10), 4, COST)
    assert [len(share) for share in plan] == [1, 1, 1, 1]
    assert sorted(share[0][0].weight for share in plan) == [0.0, 1.0, 1.0, 1.0]


def test_nothing_to_train_on_is_one_spare_micro_batch_each():
    plan = planning.plan([], SPARE, conf(), 3, COST)
    assert plan == [[[SPARE]]] * 3 and len(SPARE) == 2 and SPARE.weight == 0
    assert planning.statistics([plan], conf(), COST) == {"packing/rank_imbalance": 1, "packing/micro_batches": 1}


@pytest.mark.parametrize("mix", ["log-normal", "bimodal", "uniform"])
@pytest.mark.parametrize("count", [40, 2000])
def test_rows_are_few_and_full(mix, count):
    documents = draw(mix, count)
    (rows,) = planning.plan(documents, SPARE, conf(multiple=64), 1, COST)
    least = least_rows(documents)
    assert len(rows) <= max(least + 1, 1.02 * least)
    computed = sum(math.ceil(sum(map(len, row)) / 64) * 64 for row in rows)
    fill = planning.statistics([[rows]], conf(multiple=64), COST)["packing/fill"]
    assert fill == pytest.approx(sum(map(len, documents)) / computed) and fill >= 0.98


@pytest.mark.parametrize("mix", ["log-normal", "bimodal", "uniform"])
@pytest.mark.parametrize("ranks, each", [(8, 16), (64, 16), (8, 100)])
def test_ranks_compute_the_same(mix, ranks, each):
    documents = draw(mix, ranks * each)
    plan = planning.plan(documents, SPARE, conf(), ranks, COST)
    one = list(map(flops, documents))
    load = [sum(one[d.index] for row in share for d in row if d is not SPARE) for share in plan]
    assert max(one) < sum(load) / ranks / 2
    imbalance = max(load) * ranks / sum(load)
    assert imbalance <= 1.005  # balanced by tokens, the log-normal mixes of 16 documents a rank have 1.011 and 1.013
    assert planning.statistics([plan], conf(), COST)["packing/rank_imbalance"] == pytest.approx(imbalance, rel=1e-3)
    assert len(plan[0]) <= math.ceil(least_rows(documents) / ranks) + 1
    for share in plan:  # costliest first
        costs = [sum(one[d.index] for d in row) for row in share if SPARE not in row]
        assert costs == sorted(costs, reverse=True)


def test_a_giant_has_a_rank_to_itself():
    documents = [*draw("log-normal", 8 * 16), document(20_000, 20_000, index=128)]
    plan = planning.plan(documents, SPARE, conf(), 8, COST)
    (share,) = [share for share in plan if any(d.index == 128 for row in share for d in row)]
    assert [[d.index for d in row] for row in share if SPARE not in row] == [[128]]
    others = [sum(flops(d) for row in other for d in row) for other in plan if other is not share]
    assert max(others) / min(others) < 1.04


def test_attention_counts_in_the_balance():
    """A long document costs as much as many short ones of more tokens together."""
    quadratic = PassCost(per_token=0, per_logit=0, per_pair={None: 1})
    documents = [document(100, 100), *(document(5, 5, n + 1) for n in range(40))]
    plan = planning.plan(documents, SPARE, conf(), 2, quadratic)
    assert sorted(sorted(d.index for row in share for d in row if d is not SPARE) for share in plan) == [
        [0],
        list(range(1, 41)),
    ]


def test_the_busiest_rank_is_found_for_each_optimizer_step():
    """Ranks wait for each other at the end of each: two steps with different busiest ranks do not make up for it."""
    tokens = PassCost(per_token=1, per_logit=0, per_pair={})
    few, many = [[document(5, 5)]], [[document(15, 15)]]
    found = planning.statistics([[few, many], [many, few]], conf(), tokens)
    assert found["packing/rank_imbalance"] == pytest.approx((30 + 30) * 2 / 80)
    assert planning.statistics([[few, many]] * 2, conf(), tokens)["packing/rank_imbalance"] == pytest.approx(1.5)
    assert found["packing/micro_batches"] == 2 and found["packing/fill"] == 1


def test_a_padded_micro_batch_costs_its_longest_document_times_their_number():
    rows = [[document(10, 20), document(2, 3)], [document(10, 10)]]
    found = planning.statistics([[[rows[0]], [rows[1]]]], conf("padded", 60), COST)
    wide = 2 * flops(document(30, 0)) + COST.per_logit * 23  # the LM head computes completions only
    assert found["packing/rank_imbalance"] == pytest.approx(2 * wide / (wide + flops(rows[1][0])))
    assert found["packing/fill"] == pytest.approx((35 + 20) / (60 + 20))


@pytest.mark.parametrize("architecture", ["qwen3_next", "mixtral", "gpt2", "zamba", "xlnet", "rwkv", "musicgen"])
def test_every_model_has_a_cost(architecture):
    """Exact, or, where the FLOPs are not counted, an estimate that grows with length as attention does."""
    model = tiny(architecture)
    cost = planning.document_cost(model)
    try:
        assert cost == size(model).forward_cost
    except ValueError:
        assert 2 * cost([100], 0) < cost([200], 0) < 4 * cost([100], 0)
        weights = sum(p.numel() for p in model.parameters())
        assert 0 < cost.per_token <= 2 * weights
