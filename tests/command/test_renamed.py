"""The names of version 0.1 work, and say what to type from now on."""

import json

import pytest
from composition import composer

from posttrain.command.renamed import renamed
from posttrain.config import RECIPES
from posttrain.config.validation import changes

GROUPS = {"algorithm", "task"}


@pytest.fixture
def compose(tmp_path, monkeypatch, capsys):
    return composer(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(
    "old, new",
    [
        ("loss=dapo", "algorithm=dapo"),
        ("loss=dapo,gspo", "algorithm=dapo,gspo"),
        ("+loss=dapo", "+algorithm=dapo"),
        ("++loss.dual_clip=3", "++algorithm.dual_clip=3"),
        ("~loss", "~algorithm"),
        ("~loss.kl", "~algorithm.kl"),
        ("~loss=dapo", "~algorithm=dapo"),
        ("checkpoint.keep=3", "checkpoint.keep_last=3"),
        ("++checkpoint.keep=3,4", "++checkpoint.keep_last=3,4"),
        ("loss.kl.coefficient=1e-3", "algorithm.kl.coefficient=1e-3"),
        ("loss.kl.coefficient=1e-3,0", "algorithm.kl.coefficient=1e-3,0"),
        ('loss.surrogate="clip"', 'algorithm.surrogate="clip"'),
        ("loss='dapo'", "algorithm='dapo'"),
        ("loss={kl: {coefficient: 0.1}}", "algorithm={kl: {coefficient: 0.1}}"),
        ("hydra.sweeper.params.loss=dapo,gspo", "hydra.sweeper.params.algorithm=dapo,gspo"),
        ("+hydra.sweeper.params.loss=dapo,gspo", "+hydra.sweeper.params.algorithm=dapo,gspo"),
    ],
)
def test_old_names(capsys, old, new):
    assert renamed(["-m", old, "steps=3"], GROUPS) == ["-m", new, "steps=3"]
    assert capsys.readouterr().err == f"{old} is now {new}; the old name goes in version 0.2\n"


@pytest.mark.parametrize(
    "argument",
    [
        "checkpoint.keep_last=1",
        "checkpoint.keeper=1",
        "loss",
        "loss/x=1",
        "lossy=1",
        "model.loss=1",
        "task.path=loss=1",
        "--config-dir=loss",
    ],
)
def test_what_only_looks_like_an_old_name(capsys, argument):
    assert renamed([argument], GROUPS) == [argument] and capsys.readouterr().err == ""


def test_a_recipe_without_the_group_leaves_the_old_name_alone(compose, capsys):
    assert renamed(["loss=dapo"], {"task"}) == ["loss=dapo"] and capsys.readouterr().err == ""
    for recipe in RECIPES.keys() - {"grpo", "preflight"}:
        for name in ("loss", "algorithm"):
            status, jobs, err = compose(f"{name}=dapo", recipe=recipe)
            assert (status, jobs) == (2, []) and err.startswith(f"recipes/{recipe}.py has no group {name}. There are:")
            assert len(err.splitlines()) == 1


def test_both_names_at_once_are_refused(compose):
    status, _, err = compose("loss=dapo", "algorithm=grpo")
    assert status == 2 and "leave one of them out" in err and len(err.splitlines()) == 1


def test_a_command_line_of_before(compose):
    status, (job,), err = compose("loss=dapo", "loss.kl.coefficient=1e-3")
    assert status == 0 and (job.algorithm.clip_high, job.algorithm.kl.coefficient) == (0.28, 1e-3)
    assert err == (
        "loss=dapo loss.kl.coefficient=1e-3 is now algorithm=dapo algorithm.kl.coefficient=1e-3; "
        "the old name goes in version 0.2\n"
    )
    status, jobs, err = compose("-m", "loss=dapo,cispo", "loss.mini_batches=2")
    assert status == 0 and [job.algorithm.surrogate for job in jobs] == ["clip", "cispo"] and err.count("\n") == 1


@pytest.mark.parametrize(
    "kind, text, words",
    [
        ("experiment", "defaults:\n  - override /loss: dapo\n", ["In 'experiment/mine'", "`override /algorithm: ...`"]),
        ("experiment", "defaults:\n  - /loss: dapo\n", ["In 'experiment/mine'", "`override /algorithm: ...`"]),
        ("experiment", "loss:\n  kl:\n    coefficient: 0.1\n", ["In 'experiment/mine': loss is now algorithm"]),
        (
            "sweep",
            "hydra:\n  sweeper:\n    params:\n      loss: dapo,gspo\n",
            ["loss is now algorithm: type"],
        ),
    ],
)
def test_files_of_before(compose, tmp_path, kind, text, words):
    (tmp_path / kind).mkdir()
    (tmp_path / kind / "mine.yaml").write_text(f"# @package _global_\n{text}")
    multirun = ["-m"] if kind == "sweep" else []
    status, jobs, err = compose(*multirun, "--config-dir", str(tmp_path), f"{kind}=mine")
    assert (status, jobs, len(err.splitlines())) == (2, [], 1) and all(word in err for word in words), err


def test_a_job_of_before_is_resumed():
    before = {"steps": 10, "loss": {"kl": {"coefficient": 0.0}, "clip_high": 0.2}}
    now = {"steps": 20, "algorithm": {"kl": {"coefficient": 0.1}, "clip_high": 0.2}}
    assert changes(json.dumps(before).encode(), now) == [
        "steps=20 instead of 10",
        "algorithm.kl.coefficient=0.1 instead of 0.0",
    ]
