"""Which rewards there are, what they weigh, and what becomes of one that fails."""

import math

import pytest
from test_calling import sample

from posttrain.config.reward import OnError, RewardConf
from posttrain.errors import UserError
from posttrain.rewards import text
from posttrain.rewards.scorer import Scorer, choose
from posttrain.rewards.workers import Workers

OWN = {"correct": "exact", "format": "finished"}
WEIGHTS = {"correct": 0.9, "format": 0.1}


def scores(cfg, *samples, own=OWN):
    workers = Workers(cfg, 1)
    try:
        return Scorer(choose(own, WEIGHTS, cfg), cfg, workers).score([samples])[0]
    finally:
        workers.close()


def test_the_tasks_own():
    right, wrong = scores(RewardConf(), sample("2"), sample("3", finished=False))
    assert right == ({"correct": 1.0, "format": 1.0, "total": 1.0}, {})
    assert wrong == ({"correct": 0.0, "format": 0.0, "total": 0.0}, {})


def test_others_by_name_and_weight():
    cfg = RewardConf(weights={"correct": 2.0, "repetition": 0.5, "regex": 0.0}, pattern="^a")
    ((found, failed),) = scores(cfg, sample("a b c a b c"))
    # Three runs of three words, and one that is twice there.
    assert found == {"correct": 0.0, "repetition": -0.25, "regex": 1.0, "total": -0.125} and not failed


def test_a_file_replaces_the_tasks_own_unless_they_are_named(tmp_path):
    (tmp_path / "mine.py").write_text("def mine(completion, level): return level")
    place = f"{tmp_path}/mine.py:mine"
    assert list(choose(OWN, WEIGHTS, RewardConf(python=place))) == ["mine"]
    both = choose(OWN, WEIGHTS, RewardConf(python=[place], weights={"mine": 1.0, "correct": 0.5}))
    assert {name: weight for name, (_, weight) in both.items()} == {"mine": 1.0, "correct": 0.5}
    assert scores(RewardConf(python=place), sample())[0].scores == {"mine": 3.0, "total": 3.0}


@pytest.mark.parametrize(
    "cfg, said",
    [
        (RewardConf(weights={"corect": 1.0}), "there is no reward corect; there are exact, .*correct"),
        (RewardConf(weights={"correct": 0.0}), "nothing would count"),
        (RewardConf(python=["a.py:f", "b.py:f"]), "two functions of one name"),
        (RewardConf(python="a.py"), "type reward.python=path/to/file.py:function"),
        (RewardConf(python="a.txt:f"), "type reward.python=path/to/file.py:function"),
    ],
)
def test_names_that_mean_nothing_are_refused(cfg, said):
    with pytest.raises(UserError, match=said):
        choose(OWN, WEIGHTS, cfg)


@pytest.mark.parametrize(
    "cfg, said",
    [
        (RewardConf(weights={"regex": 1.0}), "type reward.pattern="),
        (RewardConf(weights={"regex": 1.0}, pattern="("), "no regular expression"),
        (RewardConf(weights={"json_schema": 1.0}), "type reward.schema="),
        (RewardConf(weights={"json_schema": 1.0}, schema="no.json"), "holds no JSON schema"),
    ],
)
def test_options_that_are_missing_are_refused(cfg, said):
    with pytest.raises(UserError, match=said):
        scores(cfg, sample())


def test_entries_of_a_dict_have_names_of_their_own(tmp_path):
    lines = "def mine(completion):\n    return {'score': 1, completion: 5} if completion != 'bad' else 'bad'"
    (tmp_path / "mine.py").write_text(lines)
    first, second, third = scores(RewardConf(python=f"{tmp_path}/mine.py:mine"), *map(sample, ("a", "b", "bad")))
    assert list(first.scores) == list(second.scores) == list(third.scores) == ["mine", "mine/a", "mine/b", "total"]
    assert first.scores["mine/a"] == second.scores["mine/b"] == 5 and math.isnan(first.scores["mine/b"])
    assert math.isnan(third.scores["total"]) and third.failed["mine"].startswith("value: it returned 'bad'")


@pytest.mark.parametrize("on_error, total", [(OnError.drop, math.nan), (OnError.zero, 0.1)])
def test_a_failed_reward_is_dropped_or_zero(on_error, total):
    own = {"correct": lambda completion: 1 / 0, "format": "finished"}
    (found,) = scores(RewardConf(on_error=on_error), sample(), own=own)
    assert found.scores["total"] == pytest.approx(total, nan_ok=True)
    assert found.failed == {"correct": "exception: ZeroDivisionError: division by zero"}


def test_a_failed_reward_ends_the_run():
    with pytest.raises(RuntimeError, match="the reward correct failed: exception: ZeroDivisionError"):
        scores(RewardConf(on_error=OnError.error), sample(), own={"correct": lambda completion: 1 / 0})


def test_a_schema(tmp_path):
    (tmp_path / "schema.json").write_text('{"type": "object", "required": ["n"], "properties": {"n": {"minimum": 2}}}')
    cfg = RewardConf(weights={"json_schema": 1.0}, schema=str(tmp_path / "schema.json"))
    said = ['{"n": 2}', '{"n": 1}', "{}", "n = 2", 'so:\n```json\n{"n": 3}\n```\nthat is it', "[" * 100_000]
    assert [each.scores["total"] for each in scores(cfg, *map(sample, said))] == [1, 0, 0, 0, 1, 0]


def test_a_pattern_that_backtracks_for_ever_costs_its_own_value():
    cfg = RewardConf(weights={"regex": 1.0}, pattern="^(a+)+$", timeout_s=1.0)
    slow, quick = scores(cfg, sample("a" * 40 + "b"), sample("aaa"))
    assert slow.failed == {"regex": "timeout: it took longer than 1 s"} and quick.scores["regex"] == 1


def test_length_is_of_the_group():
    ids = [range(n) for n in (4, 2, 3)]
    group = [sample(completion_ids=each) for each in ids]
    found = scores(RewardConf(weights={"length": 1.0}), *group)
    assert [each.scores["length"] for each in found] == [-1.0, 0.0, -0.5]
    assert scores(RewardConf(weights={"length": 1.0}), group[0], group[0])[1].scores["length"] == 0


def test_runs_of_words():
    assert text.repetition(2)("") == text.repetition(2)("once") == text.repetition(2)("a b c") == 0
    assert text.repetition(1)("No no NO no") == -0.75


def test_an_answer_in_a_box():
    assert text.boxed_format("so \\boxed{4}", True) == 1
    assert text.boxed_format("so \\boxed{4}", False) == text.boxed_format("so 4", True) == 0
    assert text.boxed_format("\\boxed{ }", True) == 0
