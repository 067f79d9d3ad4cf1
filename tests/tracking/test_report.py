"""The report on run directories that the tracker wrote: averages, what is absent, and what a figure shows then."""

import math
import os

import matplotlib
import pytest
import yaml

matplotlib.use("Agg")
from posttrain.command.launch import close_run
from posttrain.config import LoggerConf, LoggerName
from posttrain.errors import UserError
from posttrain.tracking import report
from posttrain.tracking.files import merge_summary
from posttrain.tracking.tracker import Tracker

PEAK = {"available": True, "reason": None, "peak_tflops_per_device": 2.0, "peak_source": "metrics.peak_tflops"}
OFF = {"available": False, "reason": "LookupError: the peak of 'NVIDIA Graphics Device' is not known"}
FLOPS = {"perf/tflops_per_device": 0.5, "perf/flops_update": 1e12}


def step_of(step, **more):
    times = {"time/rollout": 1.0, "time/update": 2.0, "perf/step_time": 3.5, "perf/tokens_per_second": 100.0 * step}
    return times | {"perf/max_memory_gb": step, "loss": 0.1 * step, "grad_norm": 1.0, "reward": 0.5} | more


def write(directory, records, mfu=PEAK, strategy="full_shard"):
    """A run of these (step, metrics), whose config says `strategy`."""
    with Tracker(directory, LoggerConf(name=LoggerName.none), True, len(records)) as tracker:
        for step, metrics in records:
            tracker.log(step, metrics)
        tracker.summary(**({"mfu": mfu} if mfu else {}))
    (directory / "config.yaml").write_text(yaml.safe_dump({"fsdp": {"strategy": strategy}, "seed": 0}))
    return directory


def died(directory, error="UserError: data.path=nowhere.jsonl is not a file", strategy="hybrid_shard"):
    """A run that failed before its first record, as the launcher closes it."""
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(yaml.safe_dump({"fsdp": {"strategy": strategy}, "seed": 0}))
    close_run(directory, "failed", error)
    return directory


def metered(steps, mfu=0.25):
    measured = {"perf/mfu": mfu, "perf/hfu": mfu, "perf/mfu_step": mfu / 2} | FLOPS
    return [(n, step_of(n, **measured, **({"perf/warmup": 1.0} if n == 1 else {}))) for n in steps]


def panel(figure, title):
    return next(axes for axes in figure.axes if axes.get_title() == title)


def texts(axes):
    return " ".join(text.get_text() for text in axes.texts).replace("\n", " ")


def drawn(axes):
    """Every point of every line."""
    return [(x, y) for line in axes.lines for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]


def test_averages_leave_out_warmup_and_an_evaluation_joins_its_step(tmp_path):
    records = metered(range(1, 5))
    records.insert(2, (2, {"eval/reward": 0.75, "time/evaluation": 9.0}))
    (run,) = report.read(write(tmp_path / "one", records))
    assert list(run.steps.index) == [1, 2, 3, 4] and run.steps.loc[2, "eval/reward"] == 0.75
    row = report.table([run]).loc["one"]
    assert row["steps"] == 4 and row["steps averaged"] == 3
    assert row["tokens/s"] == pytest.approx((200 + 300 + 400) / 3) and row["memory GB"] == 4
    assert row["MFU %"] == 25 and row["HFU %"] == 25 and row["MFU % of the step"] == 12.5
    assert row["peak TFLOP/s"] == 2.0 and row["peak from"] == "metrics.peak_tflops" and row["no MFU"] == ""
    assert row["status"] == "completed" and row["error"] == ""
    axes = report.phases([run]).axes[0]
    widths = {bars.get_label(): bar.get_width() for bars in axes.containers for bar in bars}
    assert widths == pytest.approx({"rollout": 1.0, "update": 2.0, "rest": 0.5})  # and no evaluation


def test_all_steps_count_where_all_are_warmup(tmp_path):
    (run,) = report.read(write(tmp_path / "one", metered([1])))
    assert report.table([run]).loc["one", "tokens/s"] == 100


def test_warmup_is_drawn_hollow(tmp_path):
    (run,) = report.read(write(tmp_path / "one", metered(range(1, 5))))
    values, warmup = panel(report.curves([run], report.EFFICIENCY), "MFU of the update").lines
    assert list(values.get_xdata()) == [1, 2, 3, 4] and set(values.get_ydata()) == {0.25}
    assert list(warmup.get_xdata()) == [1] and warmup.get_markerfacecolor() == "white"


def test_an_absent_mfu_is_explained_and_not_drawn(tmp_path):
    records = [(n, step_of(n, **FLOPS, **{"perf/mfu_unavailable": 1.0})) for n in (1, 2, 3)]
    (run,) = report.read(write(tmp_path / "one", records, OFF))
    row = report.table([run]).loc["one"]
    assert math.isnan(row["MFU %"]) and row["no MFU"] == OFF["reason"]
    figure = report.curves([run], report.EFFICIENCY)
    for title in ("MFU of the update", "HFU of the update", "MFU of the whole step"):
        axes = panel(figure, title)
        assert drawn(axes) == [] and OFF["reason"] in texts(axes)
        assert len(axes.get_xticks()) == len(axes.get_yticks()) == 0
    flops = panel(figure, "TFLOP/s a device, update")  # known without the peak
    assert drawn(flops) == [(1, 0.5), (2, 0.5), (3, 0.5)] and texts(flops) == ""
    axes = panel(report.bars([run]), "MFU %")
    assert OFF["reason"] in texts(axes) and not any(bar.get_width() > -1 for bar in axes.patches)  # NaN: no bar


def test_a_meter_that_failed_in_step_5(tmp_path):
    records = metered(range(1, 5)) + [(n, step_of(n, **{"perf/mfu_unavailable": 1.0})) for n in range(5, 9)]
    failed = {"available": False, "reason": "TypeError: in step five"}
    fine = write(tmp_path / "fine", metered(range(1, 9), mfu=0.5), strategy="no_shard")
    runs = report.read(write(tmp_path / "failed", records, failed), fine)
    axes = panel(report.curves(runs, report.EFFICIENCY), "MFU of the update")
    assert list(axes.lines[0].get_xdata()) == [1, 2, 3, 4] and list(axes.lines[2].get_xdata()) == list(range(1, 9))
    assert texts(axes) == "full_shard: none after step 4, TypeError: in step five"
    assert min(y for _, y in drawn(axes)) == 0.25


@pytest.mark.parametrize(
    "mfu, reason",
    [({"available": False, "reason": "metrics=none"}, "metrics=none"), (None, "completed before its first step")],
)
def test_a_run_without_a_meter_or_without_steps(tmp_path, mfu, reason):
    records = [(n, step_of(n)) for n in (1, 2)] if mfu else []
    (run,) = report.read(write(tmp_path / "one", records, mfu))
    assert reason in report.table([run]).loc["one", "no MFU"]
    axes = panel(report.curves([run], report.EFFICIENCY), "MFU of the update")
    assert drawn(axes) == [] and reason in texts(axes)


def test_a_sweep_is_named_by_what_differs_and_compared(tmp_path):
    sweep = tmp_path / "sweep"
    write(sweep / "fsdp-full_shard,steps-3", metered(range(1, 4)))
    records = [(step, metrics | {"loss": metrics["loss"] + 0.01 * step}) for step, metrics in metered(range(1, 4))]
    write(sweep / "fsdp-no_shard,steps-3", records, strategy="no_shard")
    runs = report.read(sweep)
    assert [run.name for run in runs] == ["full_shard", "no_shard"]
    found = report.agreement(runs)
    assert found.loc["no_shard", "loss"] == pytest.approx(0.03) and found.loc["full_shard", "loss"] == 0
    assert found.loc["no_shard", "grad_norm"] == 0
    widths = [bar.get_width() for bar in panel(report.bars(runs), "MFU %").patches]
    assert widths == [25, 25]


def test_runs_alike_are_named_by_their_directories(tmp_path):
    runs = report.read(write(tmp_path / "a", metered([1])), write(tmp_path / "b", metered([1])))
    assert [run.name for run in runs] == ["a", "b"]


def test_jobs_alike_of_two_sweeps_keep_their_own_names(tmp_path):
    for sweep in ("one", "two"):
        for job in ("full_shard", "no_shard"):
            write(tmp_path / sweep / job, metered([1, 2], mfu=0.5 if sweep == "two" else 0.25), strategy=job)
    runs = report.read(tmp_path / "one", tmp_path / "two", tmp_path / "two" / "no_shard")  # the last is there already
    names = ["one/full_shard", "one/no_shard", "two/full_shard", "two/no_shard"]
    assert [run.name for run in runs] == names
    assert list(report.table(runs)["MFU %"].items()) == list(zip(names, [25, 25, 50, 50], strict=True))
    assert [bar.get_width() for bar in panel(report.bars(runs), "MFU %").patches] == [25, 25, 50, 50]
    assert list(report.agreement(runs).index) == names


def figures(runs):
    return [report.curves(runs, report.EFFICIENCY), report.bars(runs), report.phases(runs)]


def test_a_job_that_failed_before_its_first_record_is_named_and_not_drawn(tmp_path):
    sweep = tmp_path / "sweep"
    died(sweep / "a")
    write(sweep / "b", metered(range(1, 4)))
    runs = report.read(sweep)
    row = report.table(runs).loc["hybrid_shard"]
    assert row["status"] == "failed" and row["steps"] == 0 and "nowhere.jsonl" in row["error"]
    assert math.isnan(row["MFU %"]) and math.isnan(row["tokens/s"])
    for figure in figures(runs):
        assert "failed before its first step: UserError: data.path=nowhere.jsonl" in texts(figure.axes[0])
        figure.canvas.draw()
    curve, *_ = panel(report.curves(runs, report.EFFICIENCY), "reward").lines
    assert curve.get_label() == "hybrid_shard" and len(curve.get_xdata()) == 0
    axes = panel(report.bars(runs), "tokens/s")
    assert [bar.get_width() > 0 for bar in axes.patches] == [False, True] and axes.get_ylim() == (1.5, -0.5)
    assert math.isnan(axes.patches[0].get_width())  # no bar, not one of 0
    agreement = report.agreement(runs)  # from the first that has steps
    assert agreement.index.name == "largest difference from full_shard"
    assert list(agreement["steps compared"]) == [0, 3] and agreement.loc["full_shard", "loss"] == 0


def test_a_single_run_without_records_shows_its_error(tmp_path):
    runs = report.read(died(tmp_path / "one", error="Traceback:\n  line\n" * 40 + "KeyError: 'x'"))
    assert "KeyError: 'x'" in report.table(runs).loc["one", "error"]
    for figure in figures(runs):
        assert "failed before its first step: Traceback" in texts(figure.axes[0]) and len(texts(figure.axes[0])) < 250
    found = report.agreement(runs)
    assert found.index.name == "no run has a step" and found.loc["one", "steps compared"] == 0


def test_a_run_still_on_or_interrupted_says_so(tmp_path):
    write(tmp_path / "a", metered([1, 2]))
    write(tmp_path / "b", metered([1]), strategy="no_shard")
    merge_summary(tmp_path / "a", status="running")
    merge_summary(tmp_path / "b", status="interrupted", error="SIGTERM")
    found = report.table(report.read(tmp_path))
    assert list(found["status"]) == ["running", "interrupted"] and list(found["error"]) == ["", "SIGTERM"]


def test_runs_of_different_lengths_agree_over_the_steps_of_both(tmp_path):
    write(tmp_path / "a", metered(range(1, 6)))
    write(tmp_path / "b", metered(range(1, 4)), strategy="no_shard")
    assert list(report.agreement(report.read(tmp_path))["steps compared"]) == [5, 3]


@pytest.mark.parametrize("missing", ["config.yaml", "summary.json"])
def test_a_missing_file_is_named(tmp_path, missing):
    write(tmp_path / "a", metered([1, 2, 3]))
    write(tmp_path / "b", metered([1, 2, 3]), strategy="no_shard")
    (tmp_path / "a" / missing).unlink()
    runs = report.read(tmp_path)
    row = report.table(runs).iloc[0]
    assert row["error"] == f"no {missing}" and row["steps"] == 3 and row["MFU %"] == 25 and row["no MFU"] == ""
    assert row["status"] == ("unknown" if missing == "summary.json" else "completed")
    assert [run.name for run in runs] == (["full_shard", "no_shard"] if missing == "summary.json" else ["a", "b"])


def test_steps_without_mfu_and_without_a_summary(tmp_path):
    directory = write(tmp_path / "one", [(n, step_of(n)) for n in (1, 2)])
    (directory / "summary.json").unlink()
    assert report.table(report.read(directory)).loc["one", "no MFU"] == "no reason in summary.json"


def test_newest(tmp_path):
    for age, directory in enumerate(["2026-01-02", "2026-01-01/fsdp-no_shard", "2026-01-03"]):
        write(tmp_path / directory, metered([1]))
        for name in ("metrics.jsonl", "summary.json"):
            os.utime(tmp_path / directory / name, (1000 - age, 1000 - age))
    assert report.newest(tmp_path).name == "2026-01-02"  # the last to be written, whatever its name
    assert report.newest(tmp_path, sweep=True).name == "2026-01-01"
    died(tmp_path / "2026-01-04")  # the last of all, and without a record
    assert report.newest(tmp_path).name == "2026-01-04"


def test_nothing_to_read_says_what_to_type(tmp_path):
    with pytest.raises(UserError, match="make train"):
        report.newest(tmp_path)
    with pytest.raises(UserError, match="make sweep"):
        report.newest(tmp_path, sweep=True)
    with pytest.raises(UserError, match="give a run or a sweep"):
        report.read(tmp_path)


def test_pictures_are_written_where_asked(tmp_path, monkeypatch):
    figure = report.phases(report.read(write(tmp_path / "one", metered([1, 2]))))
    monkeypatch.delenv("PICTURES", raising=False)
    report.save(figure, "phases")
    monkeypatch.setenv("PICTURES", str(tmp_path / "new" / "pictures"))
    report.save(figure, "phases")
    assert [path.name for path in tmp_path.rglob("*.png")] == ["phases.png"]
