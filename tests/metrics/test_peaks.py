"""The peak of a device: by its name, measured on a CPU, or not known."""

import time

import pytest
import torch

from posttrain.metrics.peaks import PEAK_TFLOPS, PROCESSORS, measured_tflops, peak_tflops, table_entry


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
        ("NVIDIA A800-SXM4-80GB", 312),
        ("NVIDIA GB200", 2500),
        ("NVIDIA GB300", 2500),
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
        ("AMD Instinct MI325X", 1307),
        ("AMD Instinct MI355X", 2500),
        ("Gaudi2", 432),
        ("Gaudi3", 1677),
    ],
)
def test_peak_by_name(name, tflops):
    assert PEAK_TFLOPS[table_entry(name)] == tflops


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA RTX A4000",  # contains A40, and A400
        "NVIDIA L40",  # not an L4, and not an L40S
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "GRID A100D-40C",  # a share of one
        "GRID A100-40C",
        "NVIDIA Graphics Device",
        "My H200",  # renamed
        "NVIDIA H100",
        "NVIDIA A40",
        "NVIDIA A30",
        "NVIDIA H800",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "NVIDIA A100X",
        "NVIDIA A100-SXM-64GB",  # a custom part with more units
        "Tesla V100-SXM2-16GB",
        "Intel H200",  # one vendor's words with another's product
        "AMD L4",
        "AMD Instinct A100",
        "NVIDIA MI300X",
        "NVIDIA Gaudi3",
        "Intel GeForce RTX 4090",
        "NVIDIA GeForce H200",
        "",
    ],
)
def test_unknown_name_has_no_peak(name):
    with pytest.raises(LookupError, match="metrics.peak_tflops="):
        table_entry(name)


def test_peak_of_a_gpu_is_labelled_and_for_bf16_alone(gpu_called):
    device = gpu_called("NVIDIA H200")
    assert peak_tflops(None, device, torch.bfloat16) == (989.0, "table: NVIDIA H200")
    with pytest.raises(LookupError, match="float32"):
        peak_tflops(None, device, torch.float32)


@pytest.mark.parametrize(
    "name, of_a_slice",
    [
        ("NVIDIA H100 80GB HBM3", 16),
        ("AMD Instinct MI300X", 38),
        ("NVIDIA H20-3e", 32),
        ("NVIDIA B300 SXM6 AC", 80),
        ("NVIDIA GB200", 76),
        ("NVIDIA GB300", 80),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 94),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 46),
    ],
)
def test_a_slice_under_the_name_of_its_chip_has_no_peak(gpu_called, name, of_a_slice):
    whole = PROCESSORS[table_entry(name)]
    assert peak_tflops(None, gpu_called(name, whole), torch.bfloat16)[0] == PEAK_TFLOPS[table_entry(name)]
    with pytest.raises(LookupError, match=f"{of_a_slice} of at least {whole} multiprocessors: a slice"):
        peak_tflops(None, gpu_called(name, of_a_slice), torch.bfloat16)


def test_every_entry_counts_multiprocessors_if_its_chip_can_be_sliced():
    whole_only = {"A10", "A10G", "L4", "L40S", "RTX 3090", "RTX 4090", "RTX 5090", "Gaudi2", "Gaudi3"}
    assert PEAK_TFLOPS.keys() - whole_only == PROCESSORS.keys()


def test_override_wins_over_everything(gpu_called):
    assert peak_tflops(123.5, gpu_called("NVIDIA H200"), torch.bfloat16) == (123.5, "metrics.peak_tflops")
    assert peak_tflops(0.5, torch.device("cpu"), torch.float32) == (0.5, "metrics.peak_tflops")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_peak_is_measured_quickly_and_labelled(dtype):
    start = time.perf_counter()
    peak, source = measured_tflops(dtype)
    assert time.perf_counter() - start < 2  # 0.3 s by design; others use this machine too
    assert 1e-5 < peak < 100
    assert source.startswith("measured: ") and str(torch.get_num_threads()) in source


def test_cpu_peak_is_that_of_a_large_matmul():
    n = 384  # short enough to end within a time slice of a busy machine
    matrix, times = torch.ones(n, n), []
    for _ in range(200):
        start = time.perf_counter()
        matrix @ matrix
        times.append(time.perf_counter() - start)
    assert measured_tflops(torch.float32)[0] == pytest.approx(2 * n**3 / min(times) / 1e12, rel=0.6)
