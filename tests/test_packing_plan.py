"""Which document goes where: each once, few rows, equal ranks; and what is refused, through the recipes."""

import json
import math
import random
import shutil
import statistics

import pytest
import torch
from conftest import command
from hypothesis import example, given, settings
from hypothesis import strategies as st

from posttrain.packing import planning
from posttrain.config import (
    Architecture,
    ArithmeticConf,
    GRPOConf,
    ModelConf,
    PackingConf,
    PackingMode,
    RolloutConf,
    TaskName,
)
from posttrain.tasks import batch, make_task
from posttrain.errors import UserError
from posttrain.flops import PassCost, size
from posttrain.models import gdn_packing
from posttrain.models.architectures import tiny
from posttrain.models.loading import end_token_ids, load
from posttrain.models.tiny import EMBEDDED
from posttrain.packing.planning import Document
from posttrain.records import Problem, Rollout
from posttrain.rollout.local import generate
from posttrain.config.rules import problems

COST = PassCost(per_token=7.2e9, per_logit=0.8e9, per_pair={None: 4e5, 512: 2e5})  # of a 4B model
BUDGET = 4096


def document(prompt: int, completion: int, index: int = 0, weight: float = 1.0) -> Document:
    rollout = Rollout(
        prompt_ids=(1,) * prompt,
        completion_ids=(2,) * completion,
        logprobs=(-1.0,) * completion,
        finish_reason="stop",
        group=0,
        answer="",
    )
    return Document(rollout=rollout, advantage=1.0, weight=weight, index=index)


SPARE = planning.spare(document(9, 9).rollout)


def conf(mode="thd", budget=BUDGET, multiple=1) -> PackingConf:
    return PackingConf(mode=PackingMode(mode), tokens_per_row=budget, pad_multiple=multiple)


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
    return cost.per_token * tokens + cost.per_logit * len(document.rollout.completion_ids) + pairs


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
    assert imbalance <= 1.02
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


@pytest.mark.parametrize("budget, multiple, instead", [(64, 65, 65), (100, 64, 64)])
def test_padding_past_the_budget_is_refused(budget, multiple, instead):
    (message,) = [m for m in problems(GRPOConf(packing=conf("thd", budget, multiple)), 1) if "packing." in m]
    assert f"packing.pad_multiple={multiple}" in message and f"type packing.tokens_per_row={instead}" in message
    assert not [m for m in problems(GRPOConf(packing=conf("thd", 128, 64)), 1) if "packing." in m]


def test_prompts_and_new_tokens_beyond_the_positions():
    prompts = [Problem(n, (1,) * length, "") for n, length in enumerate((5, 9, 7))]
    assert planning.short_of_room(prompts, 11, 20) == []
    assert planning.short_of_room(prompts, 10**6, math.inf) == []
    (warning,) = planning.short_of_room(prompts, 12, 20)
    assert "1 of 3 prompts" in warning and "rollout.max_new_tokens=12" in warning
    with pytest.raises(UserError, match="type rollout.max_new_tokens=11 or less"):
        planning.short_of_room(prompts, 16, 20)
    with pytest.raises(UserError, match="type rollout.max_new_tokens=2 or less"):
        planning.short_of_room(prompts, 4, 7)
    with pytest.raises(UserError, match="take a model of more positions"):
        planning.short_of_room(prompts, 4, 5)


@pytest.fixture
def shallow(tmp_path):
    """The embedded model with only so many positions."""

    def make(positions: int) -> str:
        folder = tmp_path / f"{positions}"
        shutil.copytree(EMBEDDED / "qwen3_5_dense", folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": positions}))
        return str(folder)

    return make


def test_documents_beyond_the_positions_do_not_count_in_supervised_steps(shallow, tmp_path):
    """The loss is the mean over the tokens of the others, each document alone in a plain model call."""
    rows = [("1+2=", "3"), ("40+2=", "42"), ("7+8=", "15" * 20), ("9+9=", "18"), ("30+30=", "6" * 30)]
    for name, shown in (("train", rows), ("heldout", rows[:1])):
        lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in shown]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    path = shallow(16)
    process = command(
        "sft", f"model.path={path}", "task=jsonl", f"task.path={tmp_path}/train.jsonl",
        f"task.eval_path={tmp_path}/heldout.jsonl", "steps=1", "batch_size=5", "evaluation.prompts=0",
        f"hydra.run.dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert process.returncode == 0, process.stdout
    record, *_ = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]

    model, tokenizer = load(ModelConf(architecture=Architecture.qwen3_5_dense))
    losses, tokens = [], 0
    for prompt, answer in (rows[0], rows[1], rows[3]):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        start = len(tokenizer(text)["input_ids"])
        ids = torch.tensor([[*tokenizer(text + answer)["input_ids"], tokenizer.eos_token_id]])
        table = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        losses += [-table[k - 1, ids[0, k]].item() for k in range(start, ids.shape[1])]
        tokens += ids.shape[1]
    assert record["packing/refused"] == 2 and record["num_tokens"] == tokens
    assert record["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def test_samples_beyond_the_positions_are_refused(grpo, shallow):
    """At the policy that sampled every ratio is 1: the loss is the mean of -advantage over the others' tokens."""
    limit, path = 12, shallow(12)
    run = grpo(
        f"model.path={path}",
        "task.max_new_tokens=4",
        "evaluation.prompts=0",
        "packing.tokens_per_row=20",
        "prompts_per_step=8",
    )
    assert run.returncode == 0, run.output
    assert "prompts, whose longest samples will be refused" in run.output and run.summary["packing"]["warnings"]

    model, tokenizer = load(ModelConf(architecture=Architecture.auto, path=path))
    gdn_packing.patch(model)
    task = make_task(ArithmeticConf(name=TaskName.arithmetic), tokenizer)
    rollouts = generate(
        model,
        list(enumerate(batch(task.train, 8, step=0, seed=0))),
        RolloutConf(group_size=4, max_new_tokens=4),
        key=(0, 0, 0),
        end_ids=end_token_ids(model, tokenizer),
        pad_id=tokenizer.pad_token_id,
    )
    rewards = [task.score(rollout, tokenizer)["total"] for rollout in rollouts]
    kept = [len(rollout.prompt_ids) + len(rollout.completion_ids) <= limit for rollout in rollouts]
    total = 0.0
    for n in range(len(rollouts)):
        if kept[n]:
            group = rewards[n // 4 * 4 : n // 4 * 4 + 4]  # a refused sample's reward still counts among its group's
            advantage = (rewards[n] - statistics.mean(group)) / (statistics.stdev(group) + 1e-4)
            total -= advantage  # the mean over its tokens, whose ratio is 1
    first = run.training[0]
    assert first["packing/refused"] == kept.count(False) > 0 < kept.count(True)
    assert first["loss"] == pytest.approx(total / kept.count(True), abs=1e-5) and abs(total) > 0.1


def test_a_model_without_room_for_any_sample_is_refused_at_start(grpo, shallow):
    run = grpo(f"model.path={shallow(10)}", "task.max_new_tokens=10")
    assert run.returncode == 2, run.output
    assert "rollout.max_new_tokens=10" in run.output and "Traceback" not in run.output
