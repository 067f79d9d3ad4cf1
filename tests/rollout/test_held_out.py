"""Evaluations that end a run early or pick a checkpoint, in whole runs."""

import json

import pytest
from conftest import SMALL, command
from faulty_runs import steps_saved

OFTEN = ["evaluation.every=1", "checkpoint.every=1", "packing.verify=false", "rollout.verify=false", "metrics=none"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A rate of nearly nothing leaves each evaluation as good as the one before."""
    directory = tmp_path_factory.mktemp("patience") / "run"
    options = [
        "steps=9",
        "optim.lr=1e-12",
        "evaluation.patience=2",
        "checkpoint.keep_last=1",
        "checkpoint.best=eval/pass@1",
    ]
    process = command("grpo", *SMALL, *OFTEN, *options, f"hydra.run.dir={directory}")
    assert process.returncode == 0, process.stdout
    return directory, process.stdout


def test_a_run_ends_once_it_gets_no_better(run):
    directory, output = run
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 3)
    assert summary["ended_early"].startswith("no eval/reward better than 0.") and "in 2 evaluations" in output


def test_the_best_checkpoint_is_the_first_of_equals(run):
    assert steps_saved(run[0]) == [1, 3]


def test_it_is_over_for_a_resume_too_unless_more_patience_is_asked_for(run):
    directory, _ = run
    again = [*SMALL, *OFTEN, "steps=9", "optim.lr=1e-12", "resume=auto", f"hydra.run.dir={directory}"]
    process = command("grpo", *again, "evaluation.patience=2")
    assert process.returncode == 0 and "nothing left to do" in process.stdout
    process = command("grpo", *again, "evaluation.patience=3")
    assert process.returncode == 0, process.stdout
    assert json.loads((directory / "summary.json").read_text())["steps"] == 4


@pytest.mark.parametrize(
    "option, said",
    [
        (
            "evaluation.metric=eval/rewrd",
            "evaluation.metric=eval/rewrd: an evaluation has eval/reward, eval/rewards/corr",
        ),
        ("checkpoint.best=eval/pass@2", "checkpoint.best=eval/pass@2: an evaluation has .*eval/pass@1"),
    ],
)
def test_a_metric_that_there_is_not_is_refused_at_start(one_rank, tmp_path, option, said):
    from jobs import values

    from posttrain.config.validation import typed
    from posttrain.errors import UserError
    from posttrain.models.tiny import tiny_tokenizer
    from posttrain.rollout.held_out import check_metric
    from posttrain.tasks import make_task

    cfg = typed("grpo", values("grpo", [option, "evaluation.every=1", "evaluation.patience=1"]))
    with pytest.raises(UserError, match=said):
        check_metric(cfg, make_task(cfg.task, tiny_tokenizer()))
