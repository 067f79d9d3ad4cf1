"""The files of a run, what survives a death, and wandb with everything wrong with it."""

import fcntl
import json
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
import torch
from conftest import ROOT

from posttrain.config import LoggerConf, LoggerName
from posttrain.tracking.files import close_summary, merge_summary, read_summary, truncate_after
from posttrain.tracking.files import read_records as stream_records
from posttrain.tracking.tracker import Tracker

SILENT = LoggerConf(name=LoggerName.none)


def tracker(run_dir, is_main=True, steps=20):
    return Tracker(run_dir, SILENT, is_main, steps)


def read_records(run_dir):
    return list(stream_records(run_dir))


def record(step, **more):
    return {"reward": step / 20, "num_tokens": 100, "time/rollout": 0.5, "time/update": 0.25} | more


def clean_environment(home, **more):
    """The environment without any of wandb's variables or stored keys."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    return kept | {"HOME": str(home), "NETRC": str(home / "netrc"), "PYTHONPATH": str(ROOT / "src"), **more}


def python(code, *arguments, timeout=60, **environment):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=timeout, **environment,
    )  # fmt: skip


def test_a_run_from_start_to_end(tmp_path, capsys):
    with tracker(tmp_path) as run:
        assert read_summary(tmp_path)["status"] == "running"
        for step in range(1, 21):
            run.log(step, record(step))
            assert len(read_records(tmp_path)) == step  # flushed each step
        run.summary(world_size=2)
        run.summary(mfu={"available": False, "reason": "no such device"})
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "completed" and summary["error"] is None
    assert summary["world_size"] == 2 and summary["steps"] == 20 and summary["tokens"] == 2000
    assert summary["reward"] == {"first_tenth": pytest.approx(0.075), "last_tenth": pytest.approx(0.975)}
    assert summary["seconds"] == {"rollout": pytest.approx(10), "update": pytest.approx(5)}
    printed = capsys.readouterr().out
    assert sum(line.startswith("step ") for line in printed.splitlines()) == 20
    assert "completed" in printed and "no such device" in printed
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []


def test_console_line(tmp_path, capsys):
    with tracker(tmp_path) as run:
        run.log(3, {"reward": 0.25, "loss": -0.5, "perf/tokens_per_second": 12345.6, "perf/step_time": 0.5})
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("step "))
    assert line == "step 3/20  reward 0.250  loss -0.5000  tokens/s 12,346  s 0.50"


def test_only_finite_numbers_are_written(tmp_path):
    values = {"a": 1, "b": float("nan"), "c": float("inf"), "d": None}
    values |= {"e": torch.tensor(0.5), "f": torch.tensor(2)}
    with tracker(tmp_path) as run:
        run.log(1, values)
    line = (tmp_path / "metrics.jsonl").read_text()
    assert line.startswith('{"step": 1')
    assert json.loads(line) == {"step": 1, "a": 1, "e": 0.5, "f": 2}


def test_other_ranks_do_nothing(tmp_path, capsys):
    with tracker(tmp_path / "run", is_main=False) as run:
        run.log(1, record(1))
        run.summary(world_size=2)
        run.finish("completed")
    assert not (tmp_path / "run").exists() and capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "error, status",
    [
        (ValueError("bad shape"), "failed"),
        (KeyboardInterrupt(), "interrupted"),
        (SystemExit(143), "interrupted"),
    ],
)
def test_a_run_that_raises(tmp_path, error, status):
    with pytest.raises(type(error)), tracker(tmp_path) as run:
        run.log(1, record(1))
        raise error
    summary = read_summary(tmp_path)
    assert summary["status"] == status and summary["tokens"] == 100
    assert type(error).__name__ in summary["error"]


def test_first_finish_counts(tmp_path):
    with tracker(tmp_path) as run:
        run.finish("interrupted", "SIGTERM")
        run.log(1, record(1))
    assert read_summary(tmp_path)["status"] == "interrupted" and read_records(tmp_path) == []


def test_a_run_of_no_steps(tmp_path):
    with tracker(tmp_path):
        pass
    summary = read_summary(tmp_path)
    assert summary["steps"] == summary["tokens"] == 0
    assert summary["reward"] == {"first_tenth": None, "last_tenth": None}


def test_evaluation_records_without_reward_do_not_count(tmp_path):
    with tracker(tmp_path) as run:
        for step in range(1, 11):
            run.log(step, record(step))
            run.log(step, {"eval/reward": 9.0})
    assert read_summary(tmp_path)["reward"] == {"first_tenth": 0.05, "last_tenth": 0.5}


def test_another_process_closes_a_dead_run_without_torch_or_wandb(tmp_path):
    run = tracker(tmp_path)
    run.__enter__()
    run.log(1, record(1))
    run.log(2, record(2))
    run.summary(world_size=4)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')  # killed in the middle of a write
    code = """
import sys
from pathlib import Path
from posttrain.tracking.files import close_summary
close_summary(Path(sys.argv[1]), "failed", "rank 1 was killed by SIGKILL")
print([name for name in ("torch", "wandb", "tqdm") if name in sys.modules])
"""
    done = python(code, tmp_path, env=clean_environment(tmp_path))
    assert done.stdout.strip() == "[]", done.stderr
    summary = read_summary(tmp_path)
    assert summary["status"] == "failed" and summary["error"] == "rank 1 was killed by SIGKILL"
    assert summary["steps"] == 2 and summary["tokens"] == 200 and summary["world_size"] == 4


def test_closing_a_run_that_never_opened(tmp_path):
    assert close_summary(tmp_path, "failed", "rank 0 died at import")["error"] == "rank 0 died at import"


def test_a_summary_whose_write_fails_half_way_is_the_old_one(tmp_path, monkeypatch):
    merge_summary(tmp_path, status="running", world_size=4)
    before = (tmp_path / "summary.json").read_bytes()

    def full(old, new):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        close_summary(tmp_path, "completed")
    monkeypatch.undo()
    assert (tmp_path / "summary.json").read_bytes() == before and read_summary(tmp_path)["status"] == "running"
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    assert close_summary(tmp_path, "completed")["world_size"] == 4


def test_a_ranks_own_words_are_kept(tmp_path):
    merge_summary(tmp_path, error="ValueError: bad shape")
    assert close_summary(tmp_path, "failed")["error"] == "ValueError: bad shape"
    assert close_summary(tmp_path, "completed")["error"] is None


def test_resume_drops_the_steps_it_will_repeat(tmp_path):
    with tracker(tmp_path) as run:
        for step in range(1, 8):
            run.log(step, record(step))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "rew')
    truncate_after(tmp_path, 5)
    with tracker(tmp_path) as run:
        assert "reward" not in read_summary(tmp_path)  # running again
        for step in range(6, 11):
            run.log(step, record(step))
    assert [line["step"] for line in read_records(tmp_path)] == list(range(1, 11))
    assert read_summary(tmp_path)["tokens"] == 1000


def test_a_torn_line_is_not_glued_to_the_next(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "re')
    with tracker(tmp_path) as run:
        run.log(2, {"reward": 1.0})
    assert read_records(tmp_path) == [{"step": 1}, {"step": 2, "reward": 1.0}]


RUN = """
import os, signal, sys, time
from pathlib import Path
from posttrain.config import LoggerConf, LoggerName, WandbMode
from posttrain.tracking.tracker import Tracker
run_dir, name, mode, event = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]

def services():  # wandb's service processes among this process's children
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = [int(pid) for path in children for pid in path.read_text().split()]
    return [pid for pid in pids if b"wandb" in Path(f"/proc/{pid}/cmdline").read_bytes()]

slowest = 0.0
cfg = LoggerConf(name=LoggerName(name), mode=WandbMode(mode))
with Tracker(run_dir, cfg, True, 20) as run:
    for step in range(1, 21):
        start = time.perf_counter()
        run.log(step, {"reward": step / 20, "num_tokens": 100, "perf/tokens_per_second": 1234.0})
        slowest = max(slowest, time.perf_counter() - start)
        if step == 10 and event == "kill":
            deadline = time.monotonic() + 20
            while run._wandb.id is None and time.monotonic() < deadline:
                time.sleep(0.05)
            for pid in (found := services()):
                os.kill(pid, signal.SIGKILL)
            print("killed", len(found))
        time.sleep(0.1 if event == "kill" and step > 10 else 0)
print("slowest", slowest)
"""


def run_with_wandb(tmp_path, mode, event="none", **more):
    run_dir = tmp_path / "run"
    start = time.monotonic()
    done = python(RUN, run_dir, "wandb", mode, event, env=clean_environment(tmp_path, **more), timeout=100)
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in read_records(run_dir)] == list(range(1, 21))
    summary = read_summary(run_dir)
    assert summary["status"] == "completed" and summary["tokens"] == 2000
    assert float(done.stdout.split("slowest")[1]) < 1.0  # no step waited
    return done, summary["logger"], time.monotonic() - start


def test_wandb_offline_writes_its_files(tmp_path):
    done, logger, _ = run_with_wandb(tmp_path, "offline")
    assert logger["name"] == "wandb" and logger["available"] and logger["reason"] is None and logger["id"]
    (file,) = (tmp_path / "run" / "wandb").glob(f"offline-run-*/run-{logger['id']}.wandb")
    assert b"perf/tokens_per_second" in file.read_bytes()
    assert "wandb is off" not in done.stdout


def said_once(done, reason):
    lines = [line for line in done.stdout.splitlines() if line.startswith("wandb is off")]
    assert len(lines) == 1 and reason in lines[0] and "Traceback" not in done.stderr


def test_wandb_without_a_key(tmp_path):
    done, logger, seconds = run_with_wandb(tmp_path, "online", WANDB_BASE_URL="http://127.0.0.1:9")
    assert not logger["available"] and "no API key" in logger["reason"]
    said_once(done, "no API key")
    assert seconds < 20


def test_wandb_with_a_dead_server(tmp_path):
    done, logger, seconds = run_with_wandb(
        tmp_path, "online", WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY="a" * 40
    )
    assert not logger["available"] and logger["reason"]
    said_once(done, "127.0.0.1:9")
    assert seconds < 90


def test_wandb_killed_in_the_middle(tmp_path):
    done, logger, seconds = run_with_wandb(tmp_path, "offline", "kill")
    assert "killed 1" in done.stdout
    assert not logger["available"] and "Error" in logger["reason"]
    said_once(done, "Error")
    assert seconds < 40


def test_wandb_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "wandb").write_text("a file where the directory should be")
    done, logger, _ = run_with_wandb(tmp_path, "offline")
    assert not logger["available"]
    said_once(done, "Not a directory")


def on_a_terminal(code, *arguments, environment, timeout=60):
    """Run Python with a terminal for stdin and stdout; returns what it showed. Fails if it waits."""
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("4H", 40, 120, 0, 0))  # rows, columns
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdin=inner, stdout=inner, stderr=inner,
        env=environment, start_new_session=True,
    )  # fmt: skip
    os.close(inner)
    shown, deadline = b"", time.monotonic() + timeout
    try:
        while True:
            ready, _, _ = select.select([outer], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"nothing happens after: {shown.decode()}"
            try:
                part = os.read(outer, 65536)
            except OSError:  # the other end is closed: Linux reports the end of a terminal as an error
                break
            shown += part
        assert process.wait(10) == 0, shown.decode()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        os.close(outer)
    return shown.decode()


def test_progress_bar_and_no_prompt_on_a_terminal(tmp_path):
    environment = clean_environment(tmp_path, WANDB_BASE_URL="http://127.0.0.1:9", TERM="xterm")
    shown = on_a_terminal(RUN, tmp_path / "run", "wandb", "online", "none", environment=environment)
    assert "20/20" in shown and "reward=1.000" in shown and "tokens/s=1,234" in shown
    assert "no API key" in shown and "step 20/20  reward" not in shown


def test_wandb_goes_on_in_its_own_run_after_a_resume(tmp_path):
    _, logger, _ = run_with_wandb(tmp_path, "offline")
    truncate_after(tmp_path / "run", 0)
    _, again, _ = run_with_wandb(tmp_path, "offline")
    assert again["id"] == logger["id"]


@pytest.mark.parametrize("gone", ["deleted", "moved"])
def test_records_that_nobody_will_find_are_not_written(tmp_path, gone, capsys):
    with pytest.raises(FileNotFoundError, match="was deleted or moved"), tracker(tmp_path / "run") as run:
        run.log(1, record(1))
        shutil.move(tmp_path / "run", tmp_path / "elsewhere")
        if gone == "deleted":
            shutil.rmtree(tmp_path / "elsewhere")
        run.log(2, record(2))
    assert "the end of the run is not on record" in capsys.readouterr().out
