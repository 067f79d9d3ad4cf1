"""Rewards of a user's own in a whole run: what counts, what is logged, and what a mistake in them says."""

import json

import pytest
from conftest import SMALL, command

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


def run(mine, name, *overrides):
    data = ["task=jsonl", f"task.path={mine}/rows.jsonl", "task.max_new_tokens=8"]
    process = command("grpo", *SMALL, *data, *overrides, f"hydra.run.dir={mine / name}")
    summary = mine / name / "summary.json"
    return process, json.loads(summary.read_text()) if summary.exists() else None


def test_two_ranks_with_a_group_reward_and_one_with_entries(mine):
    both = "reward.weights={close:1,best:0.5,correct:0}"
    process, summary = run(
        mine, "two", f"reward=python:[{mine}/mine.py:close,{mine}/mine.py:best]", both, "launch.nproc=2"
    )
    assert process.returncode == 0, process.stdout
    assert summary["world_size"] == 2 and summary["status"] == "completed"
    records = [json.loads(line) for line in (mine / "two/metrics.jsonl").read_text().splitlines()]
    for step in (record for record in records if "loss" in record):
        assert step["rewards/close/level/mean"] == 3 and 0 < step["rewards/close/mean"] <= 1
        # At least one of four is the greatest.
        assert 0.25 <= step["rewards/best/mean"] <= 1 and 0 <= step["rewards/correct/mean"] <= 1
        if not step["frac_reward_unscorable"]:
            assert step["reward"] == pytest.approx(step["rewards/close/mean"] + 0.5 * step["rewards/best/mean"])
    assert 0 <= summary["evaluation"]["eval/rewards/close"] <= 1


@pytest.mark.parametrize(
    "function, status, said",
    [
        ("says_yes", 2, "the reward says_yes fails on each of the first .* value: it returned 'yes', a str"),
        ("short", 1, "the rewards of 16 of 16 completions failed .*\n.*short: value: it returned 1 values for 4"),
        ("missing", 2, "mine.py has no function missing; it has close, best, breaks, says_yes, short"),
    ],
)
def test_a_mistake_in_them(mine, function, status, said):
    import re

    process, summary = run(mine, function, f"reward=python:{mine}/mine.py:{function}")
    assert process.returncode == status and re.search(said, process.stdout), process.stdout
    assert summary["status"] == "failed" and "Traceback" not in process.stdout


def test_a_few_failures_are_counted(mine):
    process, summary = run(mine, "some", f"reward=python:{mine}/mine.py:breaks", "reward.max_failed=0.99")
    assert process.returncode == 0, process.stdout
    records = [json.loads(line) for line in (mine / "some/metrics.jsonl").read_text().splitlines()]
    for step in (record for record in records if "loss" in record):
        failed = step.get("reward_failures/exception", 0)
        assert step["frac_reward_unscorable"] == failed / 16 and step["rewards/breaks/mean"] == 1
    assert any("reward_failures/exception" in record for record in records)
