"""What a run says on the terminal: the start banner and the closing table, from its summary.json."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

SMALL, LOW = 10_000_000, 1e-5  # models of fewer parameters hardly move at learning rates up to this


def banner(summary: Mapping[str, Any]) -> str:
    """The facts that a run starts with, a row a fact; what its recipe did not report has no row."""
    rows = {"model": f"{summary['model']}, {summary['parameters']:,} parameters"}
    if notes := summary.get("checkpoint"):
        rows["checkpoint"] = "; ".join(notes)
    ranks, threads = summary["world_size"], os.environ.get("OMP_NUM_THREADS", "?")
    rows["ranks"] = f"{ranks} x {summary['device']}, {threads} thread{'s' * (threads != '1')} each"
    if "sharding" in summary:
        rows["sharding"] = summary["sharding"]
    if "packing" in summary:
        rows |= _packing_rows(summary["packing"])
    if optim := summary.get("optim"):
        rows["optimizer"] = _optimizer(optim, summary["parameters"])
    if sampler := summary.get("sampler"):
        rows["sampler"] = _proof(sampler, " nats") if sampler["verified"] else f"NOT verified ({sampler['reason']})"
    if ahead := summary.get("max_staleness"):
        rows["sampling"] = f"at most {_steps(ahead)} ahead of training"
    task = summary["task"]
    rows["task"] = ", ".join(f"{count:,} {split}" for split, count in task.items() if split != "dropped")
    if dropped := task["dropped"]:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
        rows["dropped"] = f"{sum(dropped.values()):,} rows: {reasons}"
    if template := summary.get("template"):
        rows |= _template_rows(template)
    if answers := (summary.get("answers") or {}).get("warnings"):
        rows["answers"] = "warning: " + "; ".join(answers)
    if every := {pause: n for pause, n in summary.get("every", {}).items() if n}:
        rows["pauses"] = ", ".join(f"{pause} every {_steps(n).removeprefix('1 ')}" for pause, n in every.items())
    if summary.get("resumed_from"):
        rows["resumed from"] = summary["resumed_from"]
    if notes := summary.get("resume_notes"):
        rows["resume"] = "warning: " + "; ".join(notes)
    if mfu := summary.get("mfu"):
        rows["peak"] = (
            f"{mfu['peak_tflops_per_device']:.3g} TFLOP/s a device ({mfu['peak_source']})"
            if mfu["available"]
            else f"no MFU: {mfu['reason']}"
        )
    return table(rows)


def _template_rows(template: Mapping[str, Any]) -> dict[str, str]:
    """What the chat template does; nothing where there is none."""
    rows = {}
    if template["turn_ends"]:
        rows["turn end"] = f"{' '.join(template['turn_ends'])}, by the chat template"
    if template["system"]:
        rows["system"] = f"the system prompt is {template['system']}"
    if template["warnings"]:
        rows["prompts"] = "warning: " + "; ".join(template["warnings"])
    return rows


def _optimizer(optim: Mapping[str, Any], parameters: int) -> str:
    """Its rate as resolved: a small model of the user's own gets the default for real weights."""
    rate = f"AdamW, lr {optim['lr']:g}"
    if parameters < SMALL and optim["lr"] <= LOW:
        rate += f" (low for {parameters:,} parameters; optim.lr= sets it)"
    warmup = optim["warmup_steps"]
    return f"{rate}, {optim['schedule']}" + f" after {_steps(warmup)} of warmup" * (warmup > 0)


def _steps(steps: int) -> str:
    return f"{steps} step{'s' * (steps != 1)}"


def _packing_rows(packing: Mapping[str, Any]) -> dict[str, str]:
    if packing["verified"]:
        proof = _proof(packing)
    else:
        proof = "NOT verified (packing.verify=false)"
    rows = {"packing": f"{packing['mode']}, {proof}"}
    rows["kernels"] = ", ".join(f"{operation}: {kernel}" for operation, kernel in packing["kernels"].items())
    if packing["warnings"]:
        rows["warning"] = "; ".join(packing["warnings"])
    return rows


def _proof(found: Mapping[str, Any], unit: str = "") -> str:
    return f"verified: largest difference {found['max_difference']:.1e}, allowed {found['tolerance']:.0e}{unit}"


def closing(summary: Mapping[str, Any]) -> str:
    """How a run ended."""
    rows = {"status": summary["status"]}
    if summary["error"]:
        rows["error"] = summary["error"]
    rows["steps"] = str(summary["steps"])
    if summary["reward"]["first_tenth"] is not None:
        rows["reward"] = "{first_tenth:.3f} (first tenth) -> {last_tenth:.3f} (last tenth)".format(**summary["reward"])
    if held_out := summary.get("evaluation"):
        rows["held out"] = "  ".join(
            f"{name.removeprefix('eval/').removeprefix('rewards/')} {value:.3f}"
            for name, value in held_out.items()
            if _is_shown(name, several="eval/pass@2" in held_out)
        )
    if summary.get("ended_early"):
        rows["ended"] = f"early: {summary['ended_early']}"
    if summary["skipped_updates"]:
        rows["skipped"] = f"{summary['skipped_updates']} updates, whose loss or gradient was not finite"
    rows["tokens"] = f"{summary['tokens']:,}"
    rows["seconds"] = "  ".join(f"{phase} {spent:.1f}" for phase, spent in summary["seconds"].items())
    for part in ("mfu", "logger"):
        if (summary.get(part) or {}).get("available") is False:
            rows[f"{part} off"] = summary[part]["reason"]
    return table(rows)


def _is_shown(metric: str, several: bool) -> bool:
    """Of an evaluation: rewards, and with several samples of each prompt the shares that these give."""
    share = several and "@" in metric and metric.count("/") == 1
    return metric == "eval/reward" or metric.startswith("eval/rewards/") or share


def table(rows: Mapping[str, str]) -> str:
    width = max(map(len, rows), default=0)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows.items())
