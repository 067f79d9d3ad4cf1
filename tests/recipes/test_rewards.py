"""Rewards of a user's own in a whole run: what counts, what is logged, and what a mistake in them says."""

import json
import re

import pytest
from conftest import SMALL, command
from jobs import run_jobs

MINE = """
def close(completion, answer, level):
    try:
        distance = abs(int(completion) - int(answer))
    except ValueError:
        return None
    return {"score": 1 / (1 + distance), "level": level}

def best(completions, prompt):
    assert len(completions) == 4, completions
    return [float(each == max(completions)) for each in completions]

def breaks(completion):
    if int(completion) % 2:
        raise KeyError("no such thing")
    return 1

def says_yes(completion):
    return "yes"

def short(completions):
    return [1.0]
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("rewards")
    (directory / "mine.py").write_text(MINE)
    rows = [{"prompt": f"{a}+{b}=", "answer": a + b, "level": 3} for a in range(9) for b in range(9)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


DATA = ["task=jsonl", "task.max_new_tokens=8"]


@pytest.fixture(scope="module")
def two_ranks(mine):
    """Two jobs on one start."""
    both = [
        f"reward.python=[{mine}/mine.py:close,{mine}/mine.py:best]",
        "++reward.weights={close:1,best:0.5,correct:0}",
    ]
    some = ["reward=python", f"reward.python={mine}/mine.py:breaks", "reward.max_failed=0.99"]
    data = [*DATA, f"task.path={mine}/rows.jsonl"]
    return run_jobs(mine / "jobs", [*data, *both], [*data, *some], nproc=2)


def test_a_group_reward_and_one_with_entries(two_ranks):
    run, _ = two_ranks
    assert run.returncode == 0, run.output
    assert run.summary["world_size"] == 2 and run.summary["status"] == "completed"
    for step in run.training:
        assert step["rewards/close/level/mean"] == 3 and 0 < step["rewards/close/mean"] <= 1
        # At least one of four is the greatest.
        assert 0.25 <= step["rewards/best/mean"] <= 1 and 0 <= step["rewards/correct/mean"] <= 1
        if not step["frac_reward_unscorable"]:
            assert step["reward"] == pytest.approx(step["rewards/close/mean"] + 0.5 * step["rewards/best/mean"])
    assert 0 <= run.summary["evaluation"]["eval/rewards/close"] <= 1


def test_a_few_failures_are_counted(two_ranks):
    _, run = two_ranks
    for step in run.training:
        failed = step.get("reward_failures/exception", 0)
        assert step["frac_reward_unscorable"] == failed / 16 and step["rewards/breaks/mean"] == 1
    assert any("reward_failures/exception" in record for record in run.records)


@pytest.mark.parametrize(
    "function, status, said",
    [
        ("says_yes", 2, "the reward says_yes fails on each of the first .* value: it returned 'yes', a str"),
        ("short", 1, "the rewards of 16 of 16 completions failed .*\n.*short: value: it returned 1 values for 4"),
    ],
)
def test_a_mistake_in_them(mine, function, status, said):
    source = [f"task.path={mine}/rows.jsonl", f"reward=python:{mine}/mine.py:{function}"]
    process = command("grpo", *SMALL, *DATA, *source, f"hydra.run.dir={mine / function}")
    assert process.returncode == status and re.search(said, process.stdout), process.stdout
    assert json.loads((mine / function / "summary.json").read_text())["status"] == "failed"
    assert "Traceback" not in process.stdout
