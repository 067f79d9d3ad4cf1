"""Tables and figures of runs, from the files that they leave: metrics.jsonl, summary.json, config.yaml.

What a run lacks is absent here too: NaN in a table, the reason in a figure, never 0. Only notebooks and tests import
this: training needs neither pandas nor matplotlib.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from posttrain.errors import UserError
from posttrain.tracking.files import METRICS, SUMMARY, read_records, read_summary

EFFICIENCY = {  # metric: title of its panel
    "perf/mfu": "MFU of the update", "perf/hfu": "HFU of the update", "perf/mfu_step": "MFU of the whole step",
    "perf/tflops_per_device": "TFLOP/s a device, update", "perf/tokens_per_second": "tokens/s, all devices",
    "perf/max_memory_gb": "peak memory of rank 0, GB",
    "packing/fill": "packing: documents' part of the computed tokens", "reward": "reward",
}  # fmt: skip
COLUMNS = {  # metric: column of `table`
    "perf/step_time": "s a step", "perf/tokens_per_second": "tokens/s", "perf/tflops_per_device": "TFLOP/s a device",
    "perf/mfu": "MFU %", "perf/hfu": "HFU %", "perf/mfu_step": "MFU % of the step", "perf/max_memory_gb": "memory GB",
}  # fmt: skip
METERED = ("perf/mfu", "perf/hfu", "perf/tflops", "perf/flops")  # how the names of the meter's metrics begin
PAUSES = {"time/checkpoint", "time/evaluation"}  # between two steps, in the time of neither


@dataclass(frozen=True)
class Run:
    """`steps` has a row a step and a column a metric, NaN where the step has none. A missing file's dict is empty."""

    name: str
    directory: Path
    steps: pd.DataFrame
    summary: dict[str, Any]
    config: dict[str, Any]

    @property
    def measured(self) -> pd.DataFrame:
        """The steps that averages are of: without those marked as warm-up, unless all are."""
        steps = self.steps[self.steps["perf/step_time"].notna()]
        typical = steps[steps["perf/warmup"].isna()]
        return typical if len(typical) else steps

    @property
    def status(self) -> str:
        return self.summary.get("status", "unknown")

    @property
    def error(self) -> str:
        """What the summary says, and which files are missing."""
        missing = [f"no {name}" for name, found in ((SUMMARY, self.summary), ("config.yaml", self.config)) if not found]
        return "; ".join(filter(None, [self.summary.get("error"), *missing]))

    @property
    def empty(self) -> str | None:
        """Why this run has no step at all; None if it has."""
        reason = f"{self.status} before its first step" + (f": {self.error}" if self.error else "")
        return None if len(self.steps) else reason

    @property
    def without_mfu(self) -> str | None:
        """Why this run has no MFU, or none from some step on; None if it has."""
        unsaid = {"available": len(_values(self, "perf/mfu")) > 0, "reason": f"no reason in {SUMMARY}"}
        mfu: dict[str, Any] = self.summary.get("mfu") or unsaid
        return self.empty or (None if mfu["available"] else mfu["reason"])


def newest(root: str | Path, sweep: bool = False) -> Path:
    """The run or sweep directory in `root`, or with `sweep` the sweep, that was written to last."""
    found = [file.parent.parent for file in _files(root) if file.parent.parent.parent == Path(root)]
    if not sweep:
        found += [file.parent for file in _files(root) if file.parent.parent == Path(root)]
    if not found:
        raise UserError(f"{Path(root).resolve()} holds no {'sweep: type make sweep' if sweep else 'run: make train'}")
    return max(found, key=lambda path: max(file.stat().st_mtime for file in _files(path)))


def read(*directories: str | Path) -> list[Run]:
    """The runs in these directories: each its own, or the runs of the sweeps below it. Names say where they differ."""
    paths = list(dict.fromkeys(file.parent.resolve() for each in directories for file in _files(each)))
    if not paths:
        raise UserError(f"no run in or below {', '.join(map(str, directories))}: give a run or a sweep directory")
    files = [path / "config.yaml" for path in paths]
    configs = [yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else {} for file in files]
    names = _names(paths, configs)
    return [Run(n, p, _steps(p), read_summary(p), c) for n, p, c in zip(names, paths, configs, strict=True)]


def _files(root: str | Path) -> list[Path]:
    """What runs in or below `root` wrote: one that failed before its first record has a summary alone."""
    return sorted(file for name in (METRICS, SUMMARY) for file in Path(root).rglob(name))


def _steps(directory: Path) -> pd.DataFrame:
    """One row a step: what an evaluation or a checkpoint recorded of a step joins its row."""
    merged: dict[float, dict[str, float]] = {}
    for record in read_records(directory):
        merged.setdefault(record["step"], {}).update(record)
    columns = {"step", "perf/warmup", *COLUMNS}.union(*merged.values())
    return pd.DataFrame(list(merged.values()), columns=sorted(columns)).set_index("step").astype(float)


def _names(paths: Sequence[Path], configs: Sequence[Mapping]) -> list[str]:
    """The values in which the runs' configs differ; where these do not tell all runs apart, the ends of their paths."""
    names, depth = [], 1
    if all(configs):
        flat = [pd.json_normalize(config).to_dict("records")[0] for config in configs]
        values = {key: {str(each.get(key)) for each in flat} for each in flat for key in each}
        names = [", ".join(str(each.get(key)) for key in values if len(values[key]) > 1) for each in flat]
    while not all(names) or len(set(names)) < len(paths):
        names, depth = ["/".join(path.parts[-depth:]) for path in paths], depth + 1
    return names


def table(runs: Sequence[Run]) -> pd.DataFrame:
    """A row a run: how it ended, means without warm-up steps (memory: the most), the peak, what it lacks and why."""
    rows = {}
    for run in runs:
        means = run.measured.reindex(columns=list(COLUMNS)).mean()
        means["perf/max_memory_gb"] = run.measured["perf/max_memory_gb"].max()
        mfu = run.summary.get("mfu") or {}
        rows[run.name] = {
            "status": run.status,
            "steps": int(run.steps["perf/step_time"].count()),
            "steps averaged": len(run.measured),
            **{title: means[name] * (100 if "%" in title else 1) for name, title in COLUMNS.items()},
            "peak TFLOP/s": mfu.get("peak_tflops_per_device") or math.nan,
            "peak from": mfu.get("peak_source") or "",
            "no MFU": run.without_mfu or "",
            "error": run.error,
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("run")


def curves(runs: Sequence[Run], metrics: Mapping[str, str]) -> Figure:
    """A panel a metric (name: title) over steps, a line a run. Warm-up steps are hollow; what is absent says why."""
    rows = math.ceil(len(metrics) / 2)
    figure, panels = plt.subplots(rows, 2, figsize=(11, 2.6 * rows), squeeze=False)
    for axes, (name, title) in zip(panels.flat, metrics.items(), strict=False):
        for number, run in enumerate(runs):
            values = _values(run, name)
            warmup = values[run.steps["perf/warmup"].reindex(values.index).notna()]
            axes.plot(values.index, values, ".-", color=f"C{number}", label=run.name, linewidth=1, markersize=4)
            axes.plot(warmup.index, warmup, "o", color=f"C{number}", markerfacecolor="white", markersize=5)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if name.startswith(("perf/mfu", "perf/hfu")):
            axes.yaxis.set_major_formatter(PercentFormatter(1))
        text = "\n".join(_wrapped(reason, 62) for run in runs if (reason := _absence(run, name)))
        box = {"facecolor": "white", "alpha": 0.8, "linewidth": 0}
        axes.text(0.02, 0.95, text, transform=axes.transAxes, fontsize=7, va="top", bbox=box)
        if not any(len(_values(run, name)) for run in runs):  # ticks could be read as 0
            axes.set(xticks=[], yticks=[])
    for axes in list(panels.flat)[len(metrics) :]:
        axes.remove()
    legend = panels[0, 0].get_legend_handles_labels()
    figure.legend(*legend, loc="upper center", ncols=4, fontsize=8, bbox_to_anchor=(0.5, 0.0))
    figure.tight_layout()
    return figure


def phases(runs: Sequence[Run]) -> Figure:
    """Seconds of a step by phase, means over the steps that are no warm-up; a bar a run."""
    names = sorted({name for run in runs for name in run.measured if name.startswith("time/")} - PAUSES)
    seconds = pd.DataFrame([run.measured.reindex(columns=names).mean() for run in runs], index=[r.name for r in runs])
    seconds = seconds.rename(columns=lambda name: name.removeprefix("time/"))
    seconds["rest"] = [run.measured["perf/step_time"].mean() for run in runs] - seconds.sum(axis=1)
    axes = seconds.plot.barh(stacked=True, figsize=(11, 1.2 + 0.5 * len(runs)))
    axes.invert_yaxis()
    _in_place_of_bars(axes, [run.empty for run in runs], 60)
    axes.set_xlabel("seconds a step")
    axes.legend(fontsize=8)
    axes.figure.tight_layout()
    return axes.figure


def bars(runs: Sequence[Run]) -> Figure:
    """Throughput, MFU and memory side by side, a bar a run, from `table`. Without MFU there is a reason, not a bar."""
    found, columns = table(runs), {title: name for name, title in COLUMNS.items()}
    shown = ["tokens/s", "TFLOP/s a device", "MFU %", "memory GB"]
    figure, panels = plt.subplots(1, len(shown), figsize=(11, 1.2 + 0.5 * len(runs)), sharey=True)
    for axes, column in zip(panels, shown, strict=True):
        axes.barh(range(len(runs)), found[column], color=[f"C{number}" for number in range(len(runs))])
        axes.set_title(column, fontsize=10)
        _in_place_of_bars(axes, [_absence(run, columns[column]) for run in runs], 30)
        if found[column].isna().all():
            axes.set_xticks([])
    panels[0].set_yticks(range(len(runs)), found.index)
    panels[0].set_ylim(len(runs) - 0.5, -0.5)  # with room for a run without bars
    figure.tight_layout()
    return figure


def agreement(runs: Sequence[Run], metrics: Sequence[str] = ("loss", "grad_norm", "reward")) -> pd.DataFrame:
    """Largest difference of each run from the first that has steps, over `steps compared`: same mathematics?"""
    first = next((run for run in runs if not run.empty), runs[0])
    rows = {}
    for run in runs:
        difference = (run.steps - first.steps).reindex(columns=list(metrics)).abs().dropna(how="all")
        rows[run.name] = {"steps compared": len(difference), **difference.max()}
    name = "no run has a step" if first.empty else f"largest difference from {first.name}"
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(name)


def save(figure: Figure, name: str) -> None:
    """Write <name>.png into the directory that the environment variable PICTURES names; without it do nothing."""
    if directory := os.environ.get("PICTURES"):
        Path(directory).mkdir(parents=True, exist_ok=True)
        figure.savefig(Path(directory, f"{name}.png"), dpi=90, bbox_inches="tight")


def _values(run: Run, name: str) -> pd.Series:
    return run.steps[name].dropna() if name in run.steps else pd.Series(dtype=float)


def _absence(run: Run, name: str) -> str | None:
    """Why a run has no value of this metric, or none from some step on; None if it has."""
    if run.empty:
        return f"{run.name}: {run.empty}"
    values = _values(run, name)
    if name.startswith(METERED) and run.without_mfu:
        if len(values) and values.index[-1] >= run.measured.index[-1]:
            return None  # FLOPs of a device whose peak is not known
        since = f"none after step {values.index[-1]}, " if len(values) else ""
        return f"{run.name}: {since}{run.without_mfu}"
    return None if len(values) else f"{run.name}: not recorded"


def _in_place_of_bars(axes: Axes, reasons: Iterable[str | None], width: int) -> None:
    for number, reason in enumerate(reasons):
        axes.text(0.03, number, _wrapped(reason, width), transform=axes.get_yaxis_transform(), fontsize=6, va="center")


def _wrapped(reason: str | None, width: int) -> str:
    return textwrap.fill(textwrap.shorten(reason or "", 4 * width, placeholder=" ..."), width)
