"""The file of a job holds no secret, and its ranks know them all the same."""

import json

import pytest
from omegaconf import OmegaConf

from posttrain.command.order import read_order, resolved, without_secrets

SECRET = "sesame-4711"
TEXTS = {
    "task": {"system_prompt": "${oc.env:PASSPHRASE}", "more": "say ${oc.env:PASSPHRASE}!", "list": ["${task.more}", 1]},
    "logger": {"project": "${task.system_prompt}", "run_name": "${oc.env:NOBODY,unnamed}"},
    "steps": "${oc.env:STEPS}",
    "seed": "${steps}",
    "lr": "${upper:${task.system_prompt}}",
    "plain": 3,
}


@pytest.fixture
def values(monkeypatch):
    monkeypatch.setenv("PASSPHRASE", SECRET)
    monkeypatch.setenv("STEPS", "12")
    OmegaConf.register_new_resolver("upper", lambda text: len(text), replace=True)
    cfg = OmegaConf.create(TEXTS)
    yield cfg, OmegaConf.to_container(cfg, resolve=True)
    OmegaConf.clear_resolver("upper")


def test_only_what_comes_from_the_environment_stays_as_written(values):
    cfg, known = values
    kept = without_secrets(cfg, known)
    assert SECRET in json.dumps(known) and SECRET not in json.dumps(kept)
    assert kept["task"] == TEXTS["task"] and kept["logger"] == TEXTS["logger"]
    assert (kept["steps"], kept["seed"], kept["lr"], kept["plain"]) == ("${oc.env:STEPS}", "${steps}", len(SECRET), 3)


def test_a_rank_knows_what_the_file_does_not_say(values, tmp_path):
    cfg, known = values
    (tmp_path / "job.json").write_text(json.dumps(without_secrets(cfg, known)))
    assert read_order(tmp_path) == known
    (tmp_path / "job.next.json").write_text('{"plain": 4}')
    assert read_order(tmp_path) == {"plain": 4}


def test_values_without_interpolations_are_what_they_are():
    values = {"a": "$5 {x}", "b": None}
    assert resolved(values) is values
