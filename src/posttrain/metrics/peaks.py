"""The peak that MFU divides by: given, of the table by the device's name, or measured on a CPU; else none."""

from __future__ import annotations

import math
import re
import time

import torch

# Dense bf16 TFLOP/s of one device, by the words of its name. Vendor data sheets, 2026-11.
PEAK_TFLOPS = {
    "A100": 312, "A800": 312, "A10": 125, "A10G": 70, "L4": 121, "L40S": 362,
    "H100 80GB HBM3": 989.4, "H100 PCIe": 756, "H100 NVL": 835, "H200": 989, "H200 NVL": 835.5,
    "H20": 148, "H20 3e": 148, "GH200 480GB": 989, "B200": 2250, "B300": 2250, "GB200": 2500, "GB300": 2500,
    "RTX 3090": 71, "RTX 4090": 165.2, "RTX 5090": 209.5,
    "RTX PRO 6000 Blackwell Workstation": 503.8, "RTX PRO 6000 Blackwell Max Q Workstation": 438.9,
    "MI250X": 191.5, "MI300X": 1307, "MI325X": 1307, "MI355X": 2500, "Gaudi2": 432, "Gaudi3": 1677,
}  # fmt: skip
# Words beside an entry's that change nothing, by how the entry begins: each vendor's stand with its own products alone.
# Any other (Ti, D, Laptop, MIG, GRID, Max-Q) is another product.
NEUTRAL_WORDS = {
    "MI": set("amd instinct oam 192gb 288gb hbm3e".split()),
    "Gaudi": set("intel habana oam pcie".split()),
    "RTX": set("nvidia geforce edition".split()),
    "": set("nvidia sxm sxm2 sxm3 sxm4 sxm5 sxm6 pcie ac 40gb 80gb 141gb 180gb 192gb 288gb hbm2e hbm3e".split()),
}
# The fewest multiprocessors of a whole chip, where it can be sliced. A slice may carry the name of its chip.
PROCESSORS = {
    "A100": 108, "A800": 108, "H100 80GB HBM3": 132, "H100 PCIe": 114, "H100 NVL": 132, "H200": 132, "H200 NVL": 132,
    "H20": 78, "GH200 480GB": 132, "B200": 148, "MI250X": 110, "MI300X": 304, "MI325X": 304, "MI355X": 256,
    "RTX PRO 6000 Blackwell Workstation": 188, "RTX PRO 6000 Blackwell Max Q Workstation": 188,
    # How many of these are enabled is not sure. A whole one has more than this, a slice of half of it has not.
    "H20 3e": 60, "B300": 120, "GB200": 120, "GB300": 120,
}  # fmt: skip


def peak_tflops(override: float | None, device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Dense peak of one device in TFLOP/s, and where it is from. Raises LookupError if it is not known."""
    if override is not None:
        if not 0 < override < math.inf:
            raise ValueError(f"metrics.peak_tflops={override} is not a positive number")
        return override, "metrics.peak_tflops"
    if device.type == "cpu":
        return measured_tflops(dtype)
    module = torch.get_device_module(device)
    name = module.get_device_name(device)
    if dtype != torch.bfloat16:
        raise LookupError(f"the known peak of {name!r} is for bf16, not {dtype}; give metrics.peak_tflops=")
    entry = table_entry(name)
    whole = PROCESSORS.get(entry, 0)
    if whole and (found := module.get_device_properties(device).multi_processor_count) < whole:
        raise LookupError(
            f"{name!r} has {found} of at least {whole} multiprocessors: a slice; give metrics.peak_tflops="
        )
    return float(PEAK_TFLOPS[entry]), f"table: {name}"


def table_entry(name: str) -> str:
    """The entry of a device's name, by whole words. What stands beside the entry's words must be neutral.

    Raises LookupError for a name that is no entry's, or says more than an entry and neutral words.
    """
    words = re.findall(r"\w+", name.lower())
    for entry in PEAK_TFLOPS:
        wanted = entry.lower().split()
        neutral = next(some for start, some in NEUTRAL_WORDS.items() if entry.startswith(start))
        for start in range(len(words) - len(wanted) + 1):
            end = start + len(wanted)
            if words[start:end] == wanted and neutral.issuperset(words[:start] + words[end:]):
                return entry
    raise LookupError(f"the peak of {name!r} is not known; give metrics.peak_tflops=")


def measured_tflops(dtype: torch.dtype, budget_s: float = 0.3) -> tuple[float, str]:
    """Best of square matmuls of three sizes on this CPU with the run's threads.

    The small ones end within a time slice, so that other ranks on the same cores do not lower the peak. Multiplies
    ones: draws from no RNG.
    """
    best = (0.0, 0)
    for n in (256, 512, 1024):
        matrix, spent, elapsed = torch.ones(n, n, dtype=dtype), 0.0, 0.0
        while spent < budget_s / 3:
            start = time.perf_counter()
            torch.mm(matrix, matrix)
            elapsed = time.perf_counter() - start
            best, spent = max(best, (2 * n**3 / elapsed / 1e12, n)), spent + elapsed
        if 8 * elapsed > budget_s:
            break  # the next size takes too long here
    tflops, n = best
    return tflops, f"measured: {str(dtype).removeprefix('torch.')} matmul {n}x{n}, {torch.get_num_threads()} threads"
