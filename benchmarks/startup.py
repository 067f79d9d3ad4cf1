"""Seconds from the command to the first update, and of --help and --cfg job: medians over a few runs.

python benchmarks/startup.py [runs]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECIPE = str(Path(__file__).parents[1] / "recipes" / "grpo.py")


def seconds(*arguments: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, RECIPE, *arguments], check=True, capture_output=True)
    return time.perf_counter() - began


def first_update(*overrides: str) -> float:
    """From the command until the first step's record is on disk."""
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder) / "run" / "metrics.jsonl"
        command = [sys.executable, RECIPE, "steps=1", "evaluation.prompts=0", f"hydra.run.dir={records.parent}"]
        began = time.perf_counter()
        with subprocess.Popen([*command, *overrides], stdout=subprocess.DEVNULL) as process:
            while not records.exists() or not records.stat().st_size:
                if process.poll() not in (None, 0):
                    raise SystemExit("the run failed")
                time.sleep(0.02)
            return time.perf_counter() - began


if __name__ == "__main__":
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    print(f"{runs} runs each; seconds: median (least, most)")
    for name, measure in {
        "--help": lambda: seconds("--help"),
        "--cfg job": lambda: seconds("--cfg", "job"),
        "first update, 1 rank": first_update,
        "first update, 2 ranks": lambda: first_update("launch.nproc=2"),
    }.items():
        times = []
        for run in range(runs):
            print(f"\r{name}: run {run + 1} of {runs}", end="", flush=True)
            times.append(measure())
        print(f"\r{name:24} {statistics.median(times):6.2f} ({min(times):.2f}, {max(times):.2f})")
