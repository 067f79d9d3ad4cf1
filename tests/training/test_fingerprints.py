"""A resumed run is told when what it reads is not what it read before."""

import dataclasses
import shutil

import pytest

from posttrain.config import Architecture, JobConf, ModelConf
from posttrain.config.reward import RewardConf
from posttrain.models.configs import weights_path
from posttrain.records import Problem
from posttrain.training.fingerprints import differences, fingerprints


@pytest.fixture
def model(tmp_path):
    shutil.copytree(weights_path(ModelConf(architecture=Architecture.qwen3_dense)), tmp_path / "model")
    return ModelConf(architecture=Architecture.qwen3_dense, path=str(tmp_path / "model"))


PROBLEMS = [
    Problem(task="jsonl", index=n, prompt=str(n), prompt_ids=(n, n + 1), answer=("4", "four")) for n in range(3)
]
OTHERS = {
    "fewer": PROBLEMS[:2],
    "another order": PROBLEMS[::-1],
    "another prompt": [dataclasses.replace(PROBLEMS[0], prompt_ids=(0, 2)), *PROBLEMS[1:]],
    "another answer": [dataclasses.replace(PROBLEMS[0], answer="4"), *PROBLEMS[1:]],
}


def test_nothing_has_changed(model):
    first = fingerprints(PROBLEMS, JobConf(model=model))
    assert differences(first, fingerprints(PROBLEMS, JobConf(model=model))) == []
    assert differences({}, first) == []


@pytest.mark.parametrize("kind", OTHERS)
def test_other_problems(model, kind):
    (said,) = differences(
        fingerprints(PROBLEMS, JobConf(model=model)), fingerprints(OTHERS[kind], JobConf(model=model))
    )
    assert said.startswith("the problems are not those that the run has read so far (3 problems, SHA-256 ")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_other_model_files(model, name, tmp_path):
    before, path = fingerprints(PROBLEMS, JobConf(model=model)), tmp_path / "model" / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    (said,) = differences(before, fingerprints(PROBLEMS, JobConf(model=model)))
    assert said.startswith("the model files are not those")


def test_the_end_of_a_long_file_counts(model, tmp_path):
    path = tmp_path / "model" / "model.safetensors"
    path.write_bytes(bytes(5 * 2**20))
    before = fingerprints([], JobConf(model=model))
    path.write_bytes(bytes(5 * 2**20 - 1) + b"\1")
    assert len(differences(before, fingerprints([], JobConf(model=model)))) == 1


def test_another_reward(model, tmp_path):
    place = tmp_path / "mine.py"
    place.write_text("def score(completion): return 1")
    job = JobConf(model=model, reward=RewardConf(python=f"{place}:score"))
    before = fingerprints(PROBLEMS, job)
    assert differences(before, fingerprints(PROBLEMS, job)) == []
    place.write_text("def score(completion): return 2")
    (said,) = differences(before, fingerprints(PROBLEMS, job))
    assert said.startswith("the rewards are not those that the run has read so far (mine.py, SHA-256 ")
