"""A run's files: read as a stream, named when they are broken, and changed only when training goes on."""

import json
import tracemalloc

import pytest

from posttrain.errors import UserError
from posttrain.tracking.files import (
    adopt_order,
    close_summary,
    drop_order,
    free_room,
    is_finished,
    read_records,
    reserve_room,
    set_aside,
    truncate_after,
)

LINE = json.dumps(
    {"step": 1, "reward": 0.5, "num_tokens": 10, "time/update": 0.5} | {f"filler/{n}": n for n in range(30)}
)


@pytest.mark.parametrize("broken", ["\0" * 50, "{", "[1]", "null", '{"loss": 1}', '{"step": null}', "x"])
def test_a_line_that_is_no_record_is_named(tmp_path, broken):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{LINE}\n{broken}\n{LINE}\n")
    whole = path.read_bytes()
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2 is no record, but .*: delete the line"):
        truncate_after(tmp_path, 5)
    assert path.read_bytes() == whole and [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
    # A run that ends has a status all the same.
    summary = close_summary(tmp_path, "failed")
    assert summary["status"] == "failed" and "line 2 is no record" in summary["error"] and summary["steps"] == 0


def test_long_records_take_little_memory(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(f"{LINE}\n" * 8_000)
    tracemalloc.start()
    try:
        truncate_after(tmp_path, 5)
        summary = close_summary(tmp_path, "completed")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    size = (tmp_path / "metrics.jsonl").stat().st_size
    assert summary["tokens"] == 80_000 and sum(1 for _ in read_records(tmp_path)) == 8_000
    assert size > 4e6 and most < size / 5


def test_an_order_waits_until_training_goes_on(tmp_path):
    (tmp_path / "job.json").write_text('{"lr": 1, "a longer one": 2}')
    (tmp_path / "job.next.json").write_text('{"lr": 2}')
    (tmp_path / "config.next.yaml").write_text("lr: 2")
    inode = (tmp_path / "job.json").stat().st_ino
    adopt_order(tmp_path)
    assert (tmp_path / "job.json").read_text() == '{"lr": 2}' and (tmp_path / "config.yaml").read_text() == "lr: 2"
    # The lock on the run's directory is a lock on this very file.
    assert (tmp_path / "job.json").stat().st_ino == inode and not drop_order(tmp_path)
    (tmp_path / "job.next.json").write_text('{"lr": 3}')
    assert drop_order(tmp_path) and (tmp_path / "job.json").read_text() == '{"lr": 2}'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "job.json"]


def test_the_room_for_the_last_words(tmp_path):
    reserve_room(tmp_path)
    assert (tmp_path / "logs" / "reserve").stat().st_size >= 64 * 1024
    for half in ("checkpoints/partial_00000004", "checkpoints/removed_step_00000002", "model.partial"):
        (tmp_path / half).mkdir(parents=True)
        (tmp_path / half / "rank_00000.safetensors").write_bytes(b"half")
    (tmp_path / "summary.json.7.tmp").write_text("{")
    whole = tmp_path / "checkpoints" / "step_00000002" / "manifest.json"
    whole.parent.mkdir()
    whole.write_text("{}")
    free_room(tmp_path)
    assert [path for path in sorted(tmp_path.rglob("*")) if path.is_file()] == [whole]


def test_finished_is_completed_with_its_model(tmp_path):
    assert not is_finished(tmp_path, export=False)
    close_summary(tmp_path, "preempted")
    assert not is_finished(tmp_path, export=False)
    close_summary(tmp_path, "completed")
    assert is_finished(tmp_path, export=False) and not is_finished(tmp_path, export=True)
    (tmp_path / "model").mkdir()
    assert is_finished(tmp_path, export=True)


def test_records_of_a_run_that_begins_again_are_kept(tmp_path):
    set_aside(tmp_path)
    for text in ("", "first", "second"):
        (tmp_path / "metrics.jsonl").write_text(text)
        set_aside(tmp_path)
    assert (tmp_path / "metrics.1.jsonl").read_text() == "first"
    assert (tmp_path / "metrics.2.jsonl").read_text() == "second" and not (tmp_path / "metrics.jsonl").exists()
