"""Rewards in processes of their own: what they give, and everything that a user's file can do to a run."""

import os
import time

import psutil
import pytest
from test_calling import sample

from posttrain.config.reward import RewardConf
from posttrain.errors import UserError
from posttrain.rewards.calling import Failure
from posttrain.rewards.workers import Job, Workers

FILE = """
import os, subprocess, sys, time

def length(completion):
    return len(completion)

def where(completion):
    return {"score": os.getpid(), "threads": 1}

def hang(completion):
    while completion == "hang":
        pass
    return 1.0

def die(completion):
    if completion == "die":
        os.kill(os.getpid(), 9)
    if completion == "leave":
        sys.exit(3)
    return 1.0

def flood(completion):
    if completion == "flood":
        while True:
            print("x" * 100000)
    print("said", completion)
    return 1.0

def forks(completion):
    if completion == "fork":
        # Its parent ends at once, so that only a reaper of orphans finds the child.
        subprocess.run([sys.executable, "-c", "import subprocess, sys; print(subprocess.Popen("
            "[sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True).pid, flush=True)"],
            stdout=open(os.environ["PIDS"], "a"))
    return 1.0

def hang_with_children(completion):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    with open(os.environ["PIDS"], "a") as file:
        print(child.pid, file=file)
    time.sleep(600)

def best(completions):
    return [float(each == max(completions, key=len)) for each in completions]

def asks(completion):
    return len(input())
"""


@pytest.fixture
def workers(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    before = set(psutil.Process().children())
    made = Workers(RewardConf(timeout_s=1.0), 2)
    yield made
    made.close()
    assert set(psutil.Process().children()) <= before


@pytest.fixture
def run(workers, tmp_path):
    def run(function, *completions):
        source = f"python:{tmp_path}/mine.py:{function}"
        return [values[0] for values in workers.values([Job(source, [sample(each)]) for each in completions])]

    return run


def gone(tmp_path, count):
    """As many processes as the reward noted, each of which has ended."""
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    until = time.monotonic() + 5
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.05)
    return len(pids) == count


def test_values_come_in_the_order_of_the_jobs_from_other_processes(run):
    completions = ["x" * n for n in (5, 1, 4, 2, 3, 9, 8)]
    assert run("length", *completions) == [float(len(each)) for each in completions]
    pids = {each["score"] for each in run("where", *completions)}
    assert os.getpid() not in pids and 1 <= len(pids) <= 2


def test_a_hang_costs_its_own_value(run):
    found = run("hang", "a", "hang", "b", "hang", "c")
    assert [each for each in found if isinstance(each, float)] == [1.0] * 3
    assert found[1] == found[3] == Failure("timeout", "it took longer than 1 s")


def test_a_death_costs_its_own_value(run):
    found = run("die", "a", "die", "b", "leave", "c")
    assert [found[0], found[2], found[4]] == [1.0] * 3
    assert found[1] == Failure("died", "its process ended with signal 9")
    assert found[3].reason == "exception" and "SystemExit" in found[3].detail


def test_a_flood_costs_its_own_value_and_prints_are_seen(run, capfd):
    found = run("flood", "a", "flood", "b")
    assert found[0] == found[2] == 1.0 and found[1].reason == "flood"
    printed = capfd.readouterr().err
    assert "said a" in printed and "said b" in printed and len(printed) < 5000


def test_processes_left_behind_are_ended_and_counted(run, tmp_path):
    found = run("forks", "fork", "a", "fork")
    assert found[1] == 1.0 and found[0].reason == found[2].reason == "processes"
    assert gone(tmp_path, 2)


def test_a_hang_takes_its_children_with_it(run, tmp_path):
    assert [each.reason for each in run("hang_with_children", "a", "b")] == ["timeout"] * 2
    assert gone(tmp_path, 2)


def test_nothing_can_be_asked(run):
    """Its own input would be the next job."""
    assert [each.reason for each in run("asks", "a", "b")] == ["exception"] * 2
    assert run("length", "abc") == [3.0]


def test_a_whole_group_at_once(workers, tmp_path):
    source = f"python:{tmp_path}/mine.py:best"
    assert workers.takes_groups(source) and not workers.takes_groups(f"python:{tmp_path}/mine.py:length")
    assert workers.values([Job(source, [sample("a"), sample("abc")])]) == [[0.0, 1.0]]


@pytest.mark.parametrize(
    "text, place, said",
    [
        (None, "no.py:score", "there is no Python file"),
        ("1/0", "bad.py:score", "raises ZeroDivisionError: division by zero"),
        ("import no_such_module", "bad.py:score", "raises ModuleNotFoundError"),
        ("def mark(completion): pass", "bad.py:score", "has no function score; it has mark"),
        ("raise SystemExit(0)", "bad.py:score", "raises SystemExit"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(workers, tmp_path, text, place, said):
    if text is not None:
        (tmp_path / "bad.py").write_text(text)
    with pytest.raises(UserError, match=said):
        workers.takes_groups(f"python:{tmp_path}/{place}")


def test_a_file_imports_what_stands_beside_it(workers, tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 7")
    (tmp_path / "uses.py").write_text("import beside\ndef score(completion): return beside.VALUE")
    assert workers.values([Job(f"python:{tmp_path}/uses.py:score", [sample()])]) == [[7.0]]


def test_no_process_needs_torch(workers, tmp_path):
    (tmp_path / "asks.py").write_text("import sys\ndef score(completion): return 'torch' in sys.modules")
    assert workers.values([Job(f"python:{tmp_path}/asks.py:score", [sample()])]) == [[0.0]]
