"""What a reward is told and what it may return."""

import numpy as np
import pytest

from posttrain.rewards.calling import Failure, Sample, call, checked, takes_groups


def sample(completion="two", **fields):
    known = dict(prompt="1+1?", answer="2", finished=True, prompt_ids=(1, 2), completion_ids=(7, 0), task="sums")
    return Sample(completion=completion, **(known | {"row": {"level": 3, "answer": "a column"}} | fields))


def test_it_gets_what_it_names():
    assert call(lambda completion, answer: f"{completion}{answer}" == "two2", [sample()]) == [1.0]
    assert call(lambda level, finished=None: level + finished, [sample()]) == [4.0]
    assert call(lambda *, completion_ids, prompt_ids: len(completion_ids) * 10 + prompt_ids[1], [sample()]) == [22.0]
    assert call(lambda row, task: row["level"] + (task == "sums"), [sample()]) == [4.0]
    assert call(lambda **known: len(known), [sample()]) == [9.0]


def test_a_column_that_there_is_not_is_a_failure_that_names_those_there_are():
    (found,) = call(lambda completion, difficulty: 1.0, [sample()])
    assert found.reason == "exception" and "'difficulty'" in found.detail and "level" in found.detail


def test_one_call_for_a_group():
    def rank(completions, completions_ids, finished, answer):
        assert answer == "2" and finished == [True, False] and completions_ids == [(7, 0), (7, 8, 9)]
        return [len(each) for each in completions]

    group = [sample(), sample("three", completion_ids=(7, 8, 9), finished=False)]
    assert takes_groups(rank) and not takes_groups(lambda completion: 1)
    assert call(rank, group) == [3.0, 5.0]


@pytest.mark.parametrize("value", ["yes", [1.0], [1.0, 2.0, 3.0], 1.0, None, {"score": 1.0}])
def test_a_group_gets_as_many_values_as_it_has_completions(value):
    found = call(lambda completions: value, [sample(), sample()])
    assert [each.reason for each in found] == ["value"] * 2


def test_a_group_may_have_some_values_that_are_none():
    found = call(lambda completions: [1, "no", None], [sample()] * 3)
    assert found[0] == 1.0 and found[1].reason == "value" and found[2] is None


def test_the_best_of_several_answers_counts_for_rewards_of_ours():
    right = sample(answer=("2", "two"))
    assert call(lambda completion, answer: completion == answer, [right], any_answer=True) == [1.0]
    assert call(lambda completion, answer: answer == ("2", "two"), [right]) == [1.0]
    assert call(lambda completion, answer: None, [right], any_answer=True) == [None]
    assert call(lambda completion, answer: 1.0, [sample(answer=None)], any_answer=True) == [None]
    assert call(lambda completion: 1.0, [sample(answer=None)], any_answer=True) == [1.0]


@pytest.mark.parametrize(
    "value, read",
    [(True, 1.0), (3, 3.0), (np.float32(0.5), 0.5), (np.array(2), 2.0), (None, None), ({"score": 1, "b": None}, None)],
)
def test_numbers(value, read):
    expected = {"score": 1.0, "b": None} if isinstance(value, dict) else read
    found = checked(value)
    assert found == expected and (not isinstance(found, float) or type(found) is float)


@pytest.mark.parametrize("value", ["1", float("nan"), float("inf"), [1], {"right": 1}, {"score": "1"}, np.ones(2)])
def test_what_is_no_number_is_a_failure(value):
    assert isinstance(checked(value), Failure) and checked(value).reason == "value"


def test_an_exception_says_what_was_raised():
    def broken(completion):
        raise ZeroDivisionError("of two")

    assert call(broken, [sample()]) == [Failure("exception", "ZeroDivisionError: of two")]
