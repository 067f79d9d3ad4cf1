"""Who is waited for, and where memory ran out, from the files that ranks leave."""

import os
import time

import pytest

from posttrain.tracking.whereabouts import Whereabouts, memory_advice, places, who_is_waited_for


def ranks(run_dir, *phases):
    """One rank for each list of phases that it has come through, all of step 3."""
    for rank, through in enumerate(phases):
        here = Whereabouts(run_dir, rank)
        for phase in through:
            here.at(3, phase)


def silent(run_dir, rank, seconds):
    """Its process is stopped: nothing touches the file any more."""
    path = run_dir / "logs" / f"rank{rank}.at"
    content, past = path.read_bytes(), time.time() - seconds
    # The thread of this process keeps touching the file that it opened, which is another one now.
    path.unlink()
    path.write_bytes(content)
    os.utime(path, (past, past))


def test_a_rank_is_where_it_says(tmp_path):
    ranks(tmp_path, [], ["rollout", "reward"])
    start, reward = places(tmp_path)
    assert (start.rank, str(start)) == (0, "the start-up") and str(reward) == "phase reward of step 3"
    assert reward.number == start.number + 2 and reward.since_s < 5


def test_the_others_wait_for_the_one_behind(tmp_path):
    ranks(tmp_path, ["rollout", "reward"], ["rollout"], ["rollout", "reward"])
    said = who_is_waited_for(tmp_path, 60)
    assert said.startswith("rank 1 stands still in phase rollout of step 3: it has been there for 0 s")
    assert said.endswith("the others waited launch.timeout_s=60")


def test_a_process_that_is_stopped_is_told_apart(tmp_path):
    ranks(tmp_path, ["rollout"], ["rollout"])
    assert who_is_waited_for(tmp_path, 60).startswith("every rank is in phase rollout of step 3")
    silent(tmp_path, 1, 30)
    said = who_is_waited_for(tmp_path, 60)
    assert said.startswith(
        "rank 1 stands still in phase rollout of step 3: its process has been stopped, or its machine"
    )
    assert said.endswith("for 30 s")


def test_one_rank_waits_for_nobody_and_no_file_is_no_failure(tmp_path):
    assert who_is_waited_for(tmp_path, 60) is None and memory_advice(tmp_path, 0) == ""
    ranks(tmp_path, ["update"])
    (tmp_path / "logs" / "rank7.at").write_text("torn {")
    assert who_is_waited_for(tmp_path, 60) is None


@pytest.mark.parametrize("phase, option", [("rollout", "rollout.batch_size"), ("update", "packing.tokens_per_row")])
def test_which_options_lower_the_memory(tmp_path, phase, option):
    ranks(tmp_path, [phase])
    assert memory_advice(tmp_path, 0).startswith(f" in phase {phase} of step 3; what lowers it: {option}")


def test_a_sign_of_life_comes_by_itself(tmp_path):
    ranks(tmp_path, ["rollout"])
    path = tmp_path / "logs" / "rank0.at"
    os.utime(path, (0, 0))
    deadline = time.monotonic() + 10
    while places(tmp_path)[0].silent_s > 5:
        assert time.monotonic() < deadline
        time.sleep(0.1)
