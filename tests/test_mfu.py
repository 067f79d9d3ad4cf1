"""mfu.py: peaks by name, a meter that is right or off, and one that training cannot feel."""

import math
import time

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain import mfu
from posttrain.config import MetricsConf, MetricsName
from posttrain.flops import size
from posttrain.mfu import make_meter, measured_tflops, peak_tflops, table_tflops

SECONDS = {"rollout": 4.0, "reward": 1.0, "update": 2.0, "step": 8.0}


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


@pytest.mark.parametrize(
    "name, tflops",
    [
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H20", 148),
        ("NVIDIA H20-3e", 148),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 438.9),
        ("AMD Instinct MI250X", 191.5),
        ("AMD Instinct MI300X", 1307),
        ("AMD Instinct MI355X", 2500),
    ],
)
def test_peak_by_name(name, tflops):
    assert table_tflops(name) == tflops


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA RTX A4000",  # contains A40, and A400
        "NVIDIA L40",  # not an L4, and not an L40S
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "NVIDIA Graphics Device",
        "NVIDIA H100",
        "NVIDIA H800",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "NVIDIA A100X",
        "NVIDIA A100-SXM-64GB",  # a custom part with more units
        "Tesla V100-SXM2-16GB",
        "",
    ],
)
def test_unknown_name_has_no_peak(name):
    with pytest.raises(LookupError, match="metrics.peak_tflops="):
        table_tflops(name)


class Device:
    """A device module that says its name, in place of torch.cuda on a machine without a GPU."""

    def __init__(self, name):
        self.name = name

    def get_device_name(self, device):
        return self.name


@pytest.fixture
def gpu_called(monkeypatch):
    def call(name):
        monkeypatch.setattr(torch, "get_device_module", lambda device: Device(name))
        return torch.device("cuda", 0)

    return call


def test_peak_of_a_gpu_is_labelled_and_for_bf16_alone(gpu_called):
    device = gpu_called("NVIDIA H200")
    assert peak_tflops(None, device, torch.bfloat16) == (989.0, "table: NVIDIA H200")
    with pytest.raises(LookupError, match="float32"):
        peak_tflops(None, device, torch.float32)


def test_override_wins_over_everything(gpu_called):
    assert peak_tflops(123.5, gpu_called("NVIDIA H200"), torch.bfloat16) == (123.5, "metrics.peak_tflops")
    assert peak_tflops(0.5, torch.device("cpu"), torch.float32) == (0.5, "metrics.peak_tflops")


@pytest.mark.parametrize("peak", [0.0, -1.0, math.nan, math.inf])
def test_senseless_override_switches_off(model, peak):
    assert "peak_tflops" in meter_of(model, peak).reason


def test_unknown_device_gives_no_mfu_and_says_so(model, gpu_called, caplog):
    meter = make_meter(conf(), model, gpu_called("NVIDIA Graphics Device"), torch.bfloat16, 8)
    meter.record("update", [10], 10, training=True)
    assert meter.metrics(SECONDS) == {"perf/mfu_unavailable": 1.0}
    assert not meter.summary()["available"] and "NVIDIA Graphics Device" in meter.summary()["reason"]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_peak_is_measured_quickly_and_labelled(dtype):
    start = time.perf_counter()
    peak, source = measured_tflops(dtype)
    assert time.perf_counter() - start < 2  # 0.3 s by design; others use this machine too
    assert 1e-5 < peak < 100
    assert source.startswith("measured: ") and str(torch.get_num_threads()) in source


def test_cpu_peak_is_that_of_a_large_matmul():
    n = 768
    matrix, times = torch.ones(n, n), []
    for _ in range(5):
        start = time.perf_counter()
        matrix @ matrix
        times.append(time.perf_counter() - start)
    assert measured_tflops(torch.float32)[0] == pytest.approx(2 * n**3 / min(times) / 1e12, rel=0.6)


def test_mfu_is_flops_over_time_peak_and_devices(model):
    meter, counter = meter_of(model, peak=2.0, devices=4), size(model)
    meter.record("rollout", [30, 20], 25)
    meter.record("update", [30], 15, training=True)
    meter.record("update", [20], 10, training=True)
    rollout, update = counter.forward([30, 20], 25), counter.training([30, 20], 25)
    assert meter.metrics(SECONDS) == pytest.approx(
        {
            "perf/mfu": update / (2.0 * 4 * 2e12),
            "perf/tflops_per_device": update / (2.0 * 4 * 1e12),
            "perf/mfu_rollout": rollout / (4.0 * 4 * 2e12),
            "perf/mfu_step": (rollout + update) / (8.0 * 4 * 2e12),
        },
        rel=1e-12,
    )
    assert meter.metrics(SECONDS) == {}  # the next step starts at nothing
    assert meter.summary()["flops_per_token"] == pytest.approx(update / 50)


def test_first_step_is_marked(model):
    meter = meter_of(model)
    meter.record("update", [30], 30, training=True)
    assert meter.metrics(SECONDS, first_step=True)["perf/warmup"] == 1.0
    meter.record("update", [30], 30, training=True)
    assert "perf/warmup" not in meter.metrics(SECONDS)


def test_no_time_no_value_and_no_failure(model):
    meter = meter_of(model)
    meter.record("rollout", [30], 30)
    meter.record("update", [30], 30, training=True)
    assert set(meter.metrics({"update": 0.0, "rollout": -1e-9, "step": 1.0})) == {"perf/mfu_step"}
    assert meter.summary()["available"]
    meter.record("update", [30], 30, training=True)
    assert "perf/mfu" in meter.metrics(SECONDS)


def test_model_that_cannot_be_sized(model, caplog):
    meter = meter_of(torch.nn.Linear(2, 2))
    for _ in range(3):
        meter.record("update", [30], 30, training=True)
        assert meter.metrics(SECONDS, first_step=True) == {"perf/mfu_unavailable": 1.0}
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

    monkeypatch.setattr(mfu.FlopsCounter, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        meter.record("rollout", [1], 1)


def test_overflow_is_absent_not_infinite(model):
    meter = meter_of(model, peak=1e-300)
    meter.record("update", [30], 30, training=True)
    assert meter.metrics({"update": 1e-300, "step": 1.0}) == {"perf/mfu_unavailable": 1.0}


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
