"""Tables and figures of runs, from the files that they leave: metrics.jsonl, summary.json, config.yaml.

    runs = report.read(report.newest("outputs/grpo"))      # one run, or the jobs of a sweep
    report.table(runs)                                     # a row a run, averages without the warm-up steps
    report.curves(runs, report.EFFICIENCY)                 # a panel a metric over steps

A metric that a run lacks is absent here too: NaN in a table, the reason in a figure, never 0. Only notebooks and tests
import this: training needs neither pandas nor matplotlib.
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
from posttrain.tracking import METRICS, read_records, read_summary

EFFICIENCY = {  # metric: title of its panel
    "perf/mfu": "MFU of the update",
    "perf/hfu": "HFU of the update",
    "perf/mfu_step": "MFU of the whole step",
    "perf/tflops_per_device": "TFLOP/s a device, update",
    "perf/tokens_per_second": "tokens/s, all devices",
    "perf/max_memory_gb": "peak memory of rank 0, GB",
    "packing/fill": "packing: documents' part of the computed tokens",
    "reward": "reward",
}
COLUMNS = {  # metric: column of `table`
    "perf/step_time": "s a step",
    "perf/tokens_per_second": "tokens/s",
    "perf/tflops_per_device": "TFLOP/s a device",
    "perf/mfu": "MFU %",
    "perf/hfu": "HFU %",
    "perf/mfu_step": "MFU % of the step",
    "perf/max_memory_gb": "memory GB",
}
METERED = ("perf/mfu", "perf/hfu", "perf/tflops", "perf/flops")  # how the names of the meter's metrics begin
PAUSES = {"time/checkpoint", "time/evaluation"}  # between two steps, in the time of neither


@dataclass(frozen=True)
class Run:
    """`steps` has a row a step and a column a metric, NaN where the step has none; `config` is config.yaml's."""

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
    def without_mfu(self) -> str | None:
        """Why this run has no MFU, or none from some step on; None if it has."""
        mfu = self.summary.get("mfu") or {"available": False, "reason": "the run ended before its first step"}
        return None if mfu["available"] else mfu["reason"]


def newest(root: str | Path, sweep: bool = False) -> Path:
    """The run or sweep directory in `root`, or with `sweep` the sweep, whose records were written last."""
    found = [path for path in Path(root).glob("*/") if any(path.glob(f"*/{METRICS}"))]
    if not sweep:
        found += [path.parent for path in Path(root).glob(f"*/{METRICS}")]
    if not found:
        raise UserError(f"{Path(root).resolve()} holds no {'sweep: type make sweep' if sweep else 'run: make train'}")
    return max(found, key=lambda path: max(file.stat().st_mtime for file in path.rglob(METRICS)))


def read(*directories: str | Path) -> list[Run]:
    """The runs in these directories: each one's own, or those of the sweeps below it. Names say where they differ."""
    paths = [path.parent for each in directories for path in sorted(Path(each).rglob(METRICS))]
    if not paths:
        raise UserError(f"no {METRICS} in or below {', '.join(map(str, directories))}: give a run or a sweep directory")
    configs = [yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8")) for path in paths]
    return [
        Run(name, path, _steps(path), read_summary(path), config)
        for name, path, config in zip(_names(paths, configs), paths, configs, strict=True)
    ]


def _steps(directory: Path) -> pd.DataFrame:
    """One row a step: what an evaluation or a checkpoint recorded of a step joins its row."""
    merged: dict[int, dict[str, float]] = {}
    for record in read_records(directory):
        merged.setdefault(record["step"], {}).update(record)
    steps = pd.DataFrame(list(merged.values()), columns=sorted({key for row in merged.values() for key in row}))
    for name in {"step", "perf/warmup", *COLUMNS} - set(steps):
        steps[name] = math.nan
    return steps.set_index("step").astype(float)


def _names(paths: Sequence[Path], configs: Sequence[Mapping]) -> list[str]:
    """The values in which the runs' configs differ; the directories' names where these do not tell runs apart."""
    flat = [_flat(config) for config in configs]
    keys = [
        key for key in dict.fromkeys(key for each in flat for key in each) if len({str(c.get(key)) for c in flat}) > 1
    ]
    names = [", ".join(str(each.get(key)) for key in keys) for each in flat]
    return names if len(set(names)) == len(names) and all(names) else [path.name for path in paths]


def _flat(tree: Mapping, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def table(runs: Sequence[Run]) -> pd.DataFrame:
    """A row a run: means over the steps that are no warm-up (memory: the most), the peak, and why there is no MFU."""
    rows = {}
    for run in runs:
        means = run.measured.reindex(columns=list(COLUMNS)).mean()
        means["perf/max_memory_gb"] = run.measured["perf/max_memory_gb"].max()
        mfu = run.summary.get("mfu") or {}
        rows[run.name] = {
            "steps": len(run.measured),
            **{title: means[name] * (100 if "%" in title else 1) for name, title in COLUMNS.items()},
            "peak TFLOP/s": mfu.get("peak_tflops_per_device") or math.nan,
            "peak from": mfu.get("peak_source") or "",
            "no MFU": run.without_mfu or "",
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
            color = f"C{number}"
            axes.plot(values.index, values, ".-", color=color, label=run.name, linewidth=1, markersize=4)
            axes.plot(warmup.index, warmup, "o", color=color, markerfacecolor="white", markersize=5)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if name.startswith(("perf/mfu", "perf/hfu")):
            axes.yaxis.set_major_formatter(PercentFormatter(1))
        _explain(axes, [_absence(run, name) for run in runs], any(len(_values(run, name)) for run in runs))
    for axes in list(panels.flat)[len(metrics) :]:
        axes.remove()
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=4, fontsize=8, bbox_to_anchor=(0.5, 0.0))
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
        values = found[column]
        axes.barh(range(len(runs)), values, color=[f"C{number}" for number in range(len(runs))])
        axes.set_title(column, fontsize=10)
        for number, run in enumerate(runs):  # in the bar's place
            text = textwrap.fill(_absence(run, columns[column]) or "", 30)
            axes.text(0.03, number, text, transform=axes.get_yaxis_transform(), fontsize=6, va="center")
        if values.isna().all():
            axes.set_xticks([])
    panels[0].set_yticks(range(len(runs)), found.index)
    panels[0].invert_yaxis()
    figure.tight_layout()
    return figure


def agreement(runs: Sequence[Run], metrics: Sequence[str] = ("loss", "grad_norm", "reward")) -> pd.DataFrame:
    """Largest difference of each run from the first, over the steps that both have: is the mathematics the same?"""
    steps = [run.steps.reindex(columns=list(metrics)) for run in runs]
    rows = {run.name: (mine - steps[0]).abs().max() for run, mine in zip(runs, steps, strict=True)}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(f"largest difference from {runs[0].name}")


def save(figure: Figure, name: str) -> None:
    """Write <name>.png into the directory that the environment variable PICTURES names; without it do nothing."""
    if directory := os.environ.get("PICTURES"):
        Path(directory).mkdir(parents=True, exist_ok=True)
        figure.savefig(Path(directory, f"{name}.png"), dpi=90, bbox_inches="tight")


def _values(run: Run, name: str) -> pd.Series:
    return run.steps[name].dropna() if name in run.steps else pd.Series(dtype=float)


def _absence(run: Run, name: str) -> str | None:
    """Why a run has no value of this metric, or none from some step on; None if it has."""
    values = _values(run, name)
    if name.startswith(METERED) and run.without_mfu:
        if len(values) and values.index[-1] >= run.measured.index[-1]:
            return None  # FLOPs of a device whose peak is not known
        since = f"none after step {values.index[-1]}, " if len(values) else ""
        return f"{run.name}: {since}{run.without_mfu}"
    return None if len(values) else f"{run.name}: not recorded"


def _explain(axes: Axes, reasons: Iterable[str | None], has_values: bool) -> None:
    """Write the reasons where the values would be; a panel without any value has no ticks that could be read as 0."""
    text = "\n".join(textwrap.fill(reason, 62) for reason in reasons if reason)
    if text:
        box = {"facecolor": "white", "alpha": 0.8, "linewidth": 0}
        axes.text(0.02, 0.95, text, transform=axes.transAxes, fontsize=7, va="top", bbox=box)
    if not has_values:
        axes.set_xticks([])
        axes.set_yticks([])
