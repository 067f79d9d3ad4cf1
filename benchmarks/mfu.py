"""What metering costs of a step: the time inside the meter over the time of the steps, in one run of real steps.

    python benchmarks/mfu.py [steps=20 prompts_per_step=32 ...]

One rank in this process trains the embedded model, whose steps are the shortest there are; the share should be below
0.1 % of them. The first step is left out.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from posttrain.command.cli import _declare
from posttrain.command.rank import _import, start_process_group
from posttrain.config.validation import typed
from posttrain.tracking.files import read_records

ROOT = Path(__file__).parents[1]
QUICK = ["steps=20", "evaluation.prompts=0", "checkpoint.every=0", "checkpoint.export=false"]


def timed(method: Callable, seconds: list[float]) -> Callable:
    def call(*arguments, **keywords):
        began = time.perf_counter()
        result = method(*arguments, **keywords)
        seconds.append(time.perf_counter() - began)
        return result

    return call


if __name__ == "__main__":
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    _declare("grpo")
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        values = OmegaConf.to_container(compose("grpo", QUICK + sys.argv[1:]), resolve=True, enum_to_str=True)
    import torch

    from posttrain.metrics.mfu import Meter

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    start_process_group(60)
    calls: dict[str, list[float]] = {name: [] for name in ("__init__", "bill", "metrics")}
    for name, seconds in calls.items():
        setattr(Meter, name, timed(getattr(Meter, name), seconds))
    with tempfile.TemporaryDirectory() as folder:
        _import(ROOT / "recipes" / "grpo.py").train(typed("grpo", values), Path(folder))
        records = [record for record in read_records(Path(folder)) if "loss" in record][1:]
    if not all("perf/mfu" in record for record in records):
        raise SystemExit("the meter was off: there is nothing to measure")
    (making,) = calls.pop("__init__")
    step = statistics.median(record["perf/step_time"] for record in records)
    inside = {name: 1e3 * statistics.median(seconds[1:]) for name, seconds in calls.items()}
    print(f"\na step              {step:.3f} s, median of {len(records)}")
    print(f"in the meter        {sum(inside.values()):.3f} ms of it, {sum(inside.values()) / step / 10:.3f} %")
    print("                    " + ", ".join(f"{name} {spent:.3f} ms" for name, spent in inside.items()))
    print(f"once, at the start  {making:.2f} s: the module walk and, on a CPU, the measured peak")
