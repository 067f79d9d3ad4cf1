"""What may be typed short."""

import pytest
from composition import composer

from posttrain.command.shorthand import spelled_out


@pytest.fixture
def compose(tmp_path, monkeypatch, capsys):
    return composer(tmp_path, monkeypatch, capsys)


def test_a_function_of_ones_own(compose, tmp_path):
    (tmp_path / "my rewards.py").write_text("")
    status, (job,), _ = compose("reward=python:my rewards.py:score")
    assert status == 0 and job.reward.python == f"{tmp_path}/my rewards.py:score"


def test_several(compose, tmp_path):
    (tmp_path / "a.py").write_text("")
    status, (job,), _ = compose("reward=python:[a.py:one,b.py:two]", "reward.weights={one:1,correct:0.5}")
    assert status == 0 and job.reward.python == [f"{tmp_path}/a.py:one", "b.py:two"]
    assert job.reward.weights == {"one": 1.0, "correct": 0.5}


def test_a_reward_more(compose):
    status, (job,), _ = compose("reward.weights.correct=1", "reward.weights.length=0.1")
    assert status == 0 and job.reward.weights == {"correct": 1.0, "length": 0.1}


def test_the_rest_stays():
    arguments = ["-m", "reward=own", "reward.python=a.py:f", "steps=3"]
    assert spelled_out(arguments) == arguments
