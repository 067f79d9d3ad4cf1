"""A meter that is right or off, and one that training cannot feel."""

import json
import math
import os
import re
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, SMALL, Run
from hydra import compose, initialize_config_dir
from jobs import run_jobs
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.command import cli
from posttrain.config import MetricsConf, MetricsName
from posttrain.flops import size
from posttrain.metrics.mfu import make_meter

SECONDS = {"rollout": 4.0, "reward": 1.0, "old_logprobs": 0.5, "update": 2.0, "step": 8.0}


@pytest.fixture(scope="module")
def model():
    config = AutoConfig.for_model(
        "qwen3", vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def conf(peak=None):
    return MetricsConf(name=MetricsName.mfu, peak_tflops=peak)


def meter_of(model, peak=2.0, devices=1):
    return make_meter(conf(peak), model, torch.device("cpu"), torch.float32, devices)


@pytest.mark.parametrize("peak", [0.0, -1.0, math.nan, math.inf])
def test_senseless_override_switches_off(model, peak):
    assert "peak_tflops" in meter_of(model, peak).reason


def test_unknown_device_keeps_flops_and_has_no_mfu(model, gpu_called, caplog):
    meter = make_meter(conf(), model, gpu_called("NVIDIA Graphics Device"), torch.bfloat16, 8)
    update = size(model).training([10], 10)
    for _ in range(3):
        meter.record("update", [10], 10, training=True)
        assert meter.metrics(SECONDS) == {
            "perf/mfu_unavailable": 1.0,
            "perf/flops_update": update,
            "perf/tflops_per_device": pytest.approx(update / 2.0 / 8 / 1e12),
        }
    assert not meter.summary()["available"] and "NVIDIA Graphics Device" in meter.summary()["reason"]
    assert len(caplog.records) == 1


def test_mfu_is_flops_over_time_peak_and_devices(model):
    meter, counter = meter_of(model, peak=2.0, devices=4), size(model)
    meter.record("rollout", [30, 20], 25)
    meter.record("old_logprobs", [30, 20], 25)
    meter.record("update", [30], 15, training=True)
    meter.record("update", [20], 10, training=True)
    rollout, update = counter.forward([30, 20], 25), counter.training([30, 20], 25)
    assert meter.metrics(SECONDS) == pytest.approx(
        {
            "perf/flops_rollout": rollout,
            "perf/flops_old_logprobs": rollout,
            "perf/flops_update": update,
            "perf/mfu": update / (2.0 * 4 * 2e12),
            "perf/hfu": update / (2.0 * 4 * 2e12),
            "perf/tflops_per_device": update / (2.0 * 4 * 1e12),
            "perf/mfu_rollout": rollout / (4.0 * 4 * 2e12),
            "perf/mfu_old_logprobs": rollout / (0.5 * 4 * 2e12),
            "perf/mfu_step": (2 * rollout + update) / (8.0 * 4 * 2e12),
        },
        rel=1e-12,
    )
    assert meter.metrics(SECONDS) == {}  # the next step starts at nothing
    assert meter.summary()["flops_per_token"] == pytest.approx(update / 50)


def test_hfu_counts_what_checkpointing_recomputes(model):
    model.gradient_checkpointing_enable()
    try:
        meter = meter_of(model)
    finally:
        model.gradient_checkpointing_disable()
    meter.record("update", [30], 15, training=True)
    found, counter = meter.metrics(SECONDS), size(model)
    layers = counter.forward([30], 0)  # of one more forward pass, without the LM head
    assert found["perf/flops_update"] == counter.training([30], 15)
    assert found["perf/hfu"] / found["perf/mfu"] == pytest.approx(1 + layers / counter.training([30], 15))


@pytest.mark.parametrize("seconds", [{"update": 0.0, "step": 1.0}, {"update": -1e-9, "step": 1.0}, {"step": 1.0}])
def test_a_clock_that_stands_still(model, seconds, caplog):
    meter = meter_of(model)
    meter.record("update", [30], 30, training=True)
    assert meter.metrics(seconds) == {"perf/mfu_unavailable": 1.0}
    assert "update" in meter.summary()["reason"] and len(caplog.records) == 1


def test_no_update_has_no_mfu_and_is_no_failure(model):
    meter = meter_of(model)
    meter.record("rollout", [30], 30)
    meter.record("update", [], 0, training=True)
    assert set(meter.metrics(SECONDS | {"update": 0.0})) == {"perf/flops_rollout", "perf/mfu_rollout", "perf/mfu_step"}
    assert meter.summary()["available"]


def test_model_that_cannot_be_sized(model, caplog):
    meter = meter_of(torch.nn.Linear(2, 2))
    for _ in range(3):
        meter.record("update", [30], 30, training=True)
        assert meter.metrics(SECONDS) == {"perf/mfu_unavailable": 1.0}
    assert not meter.summary()["available"] and "Linear" in meter.reason
    assert len(caplog.records) == 1


@pytest.mark.parametrize("where", ["record", "metrics"])
def test_failure_in_step_five_switches_off_for_good(model, caplog, where):
    meter = meter_of(model)
    for step in range(1, 9):
        bad = step == 5
        meter.record("update", ["thirty"] if bad and where == "record" else [30], 30, training=True)
        metrics = meter.metrics({"update": "soon", "step": 1.0} if bad and where == "metrics" else SECONDS)
        if step < 5:
            assert metrics["perf/mfu"] > 0 and "perf/mfu_unavailable" not in metrics
        else:
            assert metrics == {"perf/mfu_unavailable": 1.0}
    assert len(caplog.records) == 1 and "TypeError" in meter.summary()["reason"]


def test_interrupts_are_not_caught(model, monkeypatch):
    meter = meter_of(model)

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(meter.counter), "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        meter.record("rollout", [1], 1)


def test_overflow_is_absent_not_infinite(model):
    meter = meter_of(model, peak=1e-300)
    meter.record("update", [30], 30, training=True)
    found = meter.metrics({"update": 1e-300, "step": 1.0})
    assert found["perf/mfu_unavailable"] == 1 and "perf/mfu" not in found
    assert all(math.isfinite(value) for value in found.values())


def test_no_random_number_is_drawn(model):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    meter = make_meter(conf(), model, "cpu", torch.float32, 1)
    meter.record("update", [30], 30, training=True)
    meter.metrics(SECONDS)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_step_costs_little(model):
    meter, lengths = meter_of(model), [100] * 2048
    start = time.perf_counter()
    for _ in range(10):
        meter.record("rollout", lengths, 1000)
        meter.record("update", lengths, 1000, training=True)
        meter.metrics(SECONDS)
    assert (time.perf_counter() - start) / 10 < 0.05  # a step of 2,048 sequences takes minutes


FAULTS = {  # what breaks, in which rank's words: part of the reason, and the first step without MFU
    "metering in step 5": ("ZeroDivisionError", 5),
    "the clock": ("rollout took 0.0 s", 1),
    "the device's name": ("NVIDIA Graphics Device", 1),
    "sizing on rank 0": ("no such layer", 1),
    "sizing on rank 1": (None, None),  # rank 0 writes the records, and has no need of the others
}
TRAIN_WITH_FAULTS = """
import json, os, sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch
from accelerate.state import AcceleratorState
from posttrain import run
from posttrain.command.rank import _import, start_process_group
from posttrain.config.validation import typed
from posttrain.metrics import step as metrics

root, job, out, faults = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3]), sys.argv[4:]
rank = int(os.environ["RANK"])
if rank:
    log = os.open(out / "rank1.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1), os.dup2(log, 2)
start_process_group(60)
recipe = _import(root / "recipes" / "grpo.py")
recipe.train(typed("grpo", job), out / "metrics=none")
job |= {"evaluation": job["evaluation"] | {"every": 0}, "checkpoint": job["checkpoint"] | {"every": 0}}
assert not {"posttrain.metrics.mfu", "posttrain.metrics.peaks", "pandas", "matplotlib"} & set(sys.modules)
from posttrain.metrics import mfu, peaks

def unsizable(model):
    raise ValueError("no such layer")

calls = []
def broken_in_step_5(self, *arguments):
    calls.append(1)
    return rollout(self, *arguments) / (len(calls) != 5)

rollout = mfu.FlopsCounter.rollout
stopped = SimpleNamespace(perf_counter=lambda: 0.0)
patches = {
    "metering in step 5": [patch.object(mfu.FlopsCounter, "rollout", broken_in_step_5)],
    "the clock": [patch.object(metrics, "time", stopped), patch.object(run, "time", stopped)],
    "the device's name": [patch.object(mfu, "peak_tflops", lambda *_: peaks.table_entry("NVIDIA Graphics Device"))],
    "sizing on rank 0": [patch.object(mfu, "size", unsizable)] if rank == 0 else [],
    "sizing on rank 1": [patch.object(mfu, "size", unsizable)] if rank == 1 else [],
}
for fault in faults:
    for each in patches[fault]:
        each.start()
    print("BROKEN:", fault, flush=True)
    AcceleratorState._reset_state(reset_partial_state=True)  # the next job of this process
    recipe.train(typed("grpo", job | {"metrics": job["metrics"] | {"name": "mfu", "peak_tflops": 1.0}}), out / fault)
    for each in patches[fault]:
        each.stop()
os._exit(0)
"""


@pytest.fixture(scope="module")
def faulty_runs(tmp_path_factory):
    """A job on two ranks without a meter, then with each fault in its meter."""
    out = tmp_path_factory.mktemp("faults")
    (out / "script.py").write_text(TRAIN_WITH_FAULTS)
    overrides = ["metrics=none", "steps=6", "packing.verify=false", "evaluation.every=2", "checkpoint.every=3"]
    cli._declare("grpo")
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        job = OmegaConf.to_container(compose("grpo", [*SMALL, *overrides]), resolve=True, enum_to_str=True)
    (out / "job.json").write_text(json.dumps(job))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    process = subprocess.run(
        [*launcher, str(out / "script.py"), str(ROOT), str(out / "job.json"), str(out), *FAULTS],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stdout
    said = dict(part.split("\n", 1) for part in process.stdout.split("BROKEN: ")[1:])
    return (
        Run(out / "metrics=none", 0, ""),
        {fault: Run(out / fault, 0, said[fault]) for fault in FAULTS},
        (out / "rank1.log").read_text(),
    )


def trained(run):
    return [{k: v for k, v in record.items() if not k.startswith(("time/", "perf/"))} for record in run.training]


@pytest.mark.parametrize("fault", FAULTS)
def test_training_cannot_feel_a_meter_that_fails(faulty_runs, fault):
    without, runs, others_log = faulty_runs
    run, (reason, first) = runs[fault], FAULTS[fault]
    assert trained(run) == trained(without) and len(trained(run)) == 6  # bitwise
    assert run.summary["status"] == "completed" and run.summary["mfu"]["available"] is (reason is None)
    for record in run.training:
        off = reason is not None and record["step"] >= first
        assert ("perf/mfu_unavailable" in record, "perf/mfu" in record, "perf/hfu" in record) == (off, not off, not off)
    if reason:
        assert reason in run.summary["mfu"]["reason"]
        assert run.output.count("no MFU from here on: ") == 1
        assert re.search(f"mfu off +{re.escape(run.summary['mfu']['reason'])}\n", run.output)
    else:
        assert "mfu" not in run.output.lower()
    assert fault != "sizing on rank 1" or "no MFU from here on: ValueError: no such layer" in others_log


def test_no_meter_is_imported_and_no_metric_of_it_written(faulty_runs):
    """The script of the faults checks the modules after its first run, which has none."""
    without, *_ = faulty_runs
    assert without.summary["mfu"] == {"available": False, "reason": "metrics=none"}
    assert {name for record in without.training for name in record if name.startswith("perf/")} == {
        "perf/step_time", "perf/tokens_per_second", "perf/max_memory_gb", "perf/warmup"
    }  # fmt: skip


def test_steps_after_a_pause_are_marked_and_hold_no_pause(faulty_runs):
    """The first step, and those after an evaluation (of steps 2 and 4) or a checkpoint (of steps 3 and 6)."""
    run, *_ = faulty_runs
    assert [record["step"] for record in run.training if "perf/warmup" in record] == [1, 3, 4, 5]
    pauses = {name: [r["step"] for r in run.records if name in r] for name in ("time/evaluation", "time/checkpoint")}
    assert pauses == {"time/evaluation": [2, 4, 6], "time/checkpoint": [3, 6]}
    assert all("loss" not in record for record in run.records if pauses.keys() & record.keys())
    assert {"checkpoint", "evaluation"} <= run.summary["seconds"].keys()


def test_two_ranks_are_two_devices_and_spares_are_not_billed(tmp_path):
    """A row a document and an odd number of documents: one rank has a spare."""
    overrides = ["prompts_per_step=3", "rollout.group_size=3", "packing.tokens_per_row=1", "evaluation.prompts=0"]
    overrides += ["metrics.peak_tflops=0.5", "metrics.full_every=1"]
    (one,) = run_jobs(tmp_path / "one", overrides)
    (two,) = run_jobs(tmp_path / "two", overrides, nproc=2)
    assert one.returncode == two.returncode == 0, one.output + two.output
    assert (one.summary["world_size"], two.summary["world_size"]) == (1, 2)
    spared = [record["packing/fill"] < 1 for record in two.training]
    assert any(spared) and all(record["packing/fill"] == 1 for record in one.training)
    for alone, shared in zip(one.training, two.training, strict=True):
        for name in ("perf/flops_update", "perf/flops_rollout", "perf/flops_metrics"):
            assert shared[name] == alone[name], name
        for record, devices in ((alone, 1), (shared, 2)):
            rate = record["perf/flops_update"] / record["time/update"] / 1e12 / devices
            assert record["perf/tflops_per_device"] == pytest.approx(rate)
            assert record["perf/mfu"] == pytest.approx(rate / 0.5)


def test_a_rate_above_the_peak_is_absent_and_says_so(model, caplog):
    """It cannot be: the peak is another device's, or the clock is wrong. FLOPs and TFLOP/s remain."""
    meter = meter_of(model, peak=1e-9)
    meter.record("update", [30], 30, training=True)
    values = meter.metrics({"update": 0.01, "step": 0.02})
    assert values["perf/mfu_unavailable"] == 1 and "perf/mfu" not in values and "perf/hfu" not in values
    assert values["perf/tflops_per_device"] > 1e-9 and values["perf/flops_update"] > 0
    assert "above the peak" in meter.summary()["reason"] and not meter.summary()["available"]
    assert "metrics.peak_tflops" in caplog.text
