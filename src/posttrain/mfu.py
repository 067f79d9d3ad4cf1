"""Model FLOPs utilisation: right or absent, and never in the way of training.

    meter = make_meter(cfg.metrics, model, device, dtype, world_size)
    meter.record_rollout(groups)                                 # of all ranks: so no collective is needed
    meter.record("update", lengths, logits, training=True)
    metrics |= meter.metrics({"rollout": seconds, "update": seconds, "step": seconds}, first_step=step == 1)

MFU = model FLOPs / (seconds x peak of a device x devices), for each recorded phase by that phase's own time.
Any failure (a module that cannot be counted, a device of unknown peak, an error in step 5) switches the meter
off: one warning, `perf/mfu_unavailable` = 1 from then on in place of every value, the reason in the summary.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import distributed, nn

from posttrain.config import MetricsConf
from posttrain.flops import FlopsCounter, size

# Dense bf16 TFLOP/s of one device, by the words of its name. Vendor data sheets, 2026-11.
PEAK_TFLOPS = {
    "A100": 312, "A800": 312, "A10": 125, "A10G": 70, "L4": 121, "L40S": 362,
    "H100 80GB HBM3": 989.4, "H100 PCIe": 756, "H100 NVL": 835, "H200": 989, "H200 NVL": 835.5,
    "H20": 148, "H20 3e": 148, "GH200 480GB": 989, "B200": 2250, "B300": 2250, "GB200": 2500, "GB300": 2500,
    "RTX 3090": 71, "RTX 4090": 165.2, "RTX 5090": 209.5,
    "RTX PRO 6000 Blackwell Workstation": 503.8, "RTX PRO 6000 Blackwell Max Q Workstation": 438.9,
    "MI250X": 191.5, "MI300X": 1307, "MI325X": 1307, "MI355X": 2500, "Gaudi2": 432, "Gaudi3": 1677,
}  # fmt: skip
# Words beside an entry's that change nothing. Any other (Ti, D, Laptop, MIG, Max-Q) is another product.
NEUTRAL_WORDS = set(
    "nvidia amd instinct geforce intel habana sxm sxm2 sxm3 sxm4 sxm5 sxm6 oam pcie ac edition "
    "40gb 80gb 141gb 180gb 192gb 288gb hbm2e hbm3e".split()
)


class Meter:
    """Counts FLOPs between two calls of `metrics`. `reason` says why there is no MFU, None while there is."""

    def __init__(
        self, conf: MetricsConf, model: nn.Module, device: torch.device, dtype: torch.dtype, devices: int
    ) -> None:
        self.devices = devices
        self.reason: str | None = None
        self.peak_tflops: float | None = None
        self.peak_source: str | None = None
        self.counter: FlopsCounter | None = None
        self._flops: Counter[str] = Counter()
        self._trained = Counter(flops=0, tokens=0)  # of the whole run, for FLOPs a token
        with self._off_on_failure():
            self.counter = size(model)
            self.peak_tflops, self.peak_source = peak_tflops(conf.peak_tflops, device, dtype)

    def record(self, phase: str, lengths: Sequence[int], logits: int, training: bool = False) -> None:
        """Bill `phase` for documents of these lengths and for LM head positions, both over all ranks."""
        if self.reason:
            return
        with self._off_on_failure():
            flops = (self.counter.training if training else self.counter.forward)(lengths, logits)
            self._flops[phase] += flops
            if training:
                self._trained.update(flops=flops, tokens=sum(lengths))

    def record_rollout(self, groups: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Bill the phase "rollout" for (prompt length, completion lengths) of each group, over all ranks."""
        if self.reason:
            return
        with self._off_on_failure():
            self._flops["rollout"] += self.counter.rollout(groups)

    def metrics(self, seconds: dict[str, float], first_step: bool = False) -> dict[str, float]:
        """This step's metrics, from the seconds of its phases and of the whole "step"; starts the next step.

        `perf/mfu` and `perf/tflops_per_device` are of the phase "update", `perf/mfu_<phase>` of the others,
        `perf/mfu_step` of everything recorded over the step's time. `perf/warmup` marks the first step, whose
        time holds compilation: leave it out of averages. A phase that took no time has no value.
        """
        values: dict[str, float] = {}
        with self._off_on_failure():
            flops = self._flops | {"step": sum(self._flops.values())}
            self._flops = Counter()
            for phase, count in flops.items():
                if self.reason or not count or not seconds.get(phase, 0) > 0:
                    continue
                tflops = count / seconds[phase] / self.devices / 1e12
                values["perf/mfu" if phase == "update" else f"perf/mfu_{phase}"] = tflops / self.peak_tflops
                if phase == "update":
                    values["perf/tflops_per_device"] = tflops
            if not all(map(math.isfinite, values.values())):
                raise ArithmeticError(f"not a finite number among {values}")
        if self.reason:
            return {"perf/mfu_unavailable": 1.0}
        return values | ({"perf/warmup": 1.0} if first_step else {})

    def summary(self) -> dict[str, bool | str | float | None]:
        tokens = self._trained["tokens"]
        return {
            "available": self.reason is None,
            "reason": self.reason,
            "peak_tflops_per_device": self.peak_tflops,
            "peak_source": self.peak_source,
            "flops_per_token": self._trained["flops"] / tokens if tokens else None,
        }

    @contextmanager
    def _off_on_failure(self) -> Iterator[None]:
        """The one place that catches: a metric must not cost a training run, nor vanish without a word."""
        try:
            yield
        except Exception as error:
            self.reason = f"{type(error).__name__}: {error}"
            if not distributed.is_initialized() or distributed.get_rank() == 0:
                logging.getLogger(__name__).warning("no MFU from here on: %s", self.reason)


def make_meter(
    conf: MetricsConf, model: nn.Module, device: torch.device | str, dtype: torch.dtype, world_size: int
) -> Meter:
    """A meter for `world_size` devices like this one. Never raises: a meter that failed is off."""
    return Meter(conf, model, torch.device(device), dtype, world_size)


def peak_tflops(override: float | None, device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Dense peak of one device in TFLOP/s, and where it is from. Raises LookupError if it is not known."""
    if override is not None:
        if not 0 < override < math.inf:
            raise ValueError(f"metrics.peak_tflops={override} is not a positive number")
        return override, "metrics.peak_tflops"
    if device.type == "cpu":
        return measured_tflops(dtype)
    name = torch.get_device_module(device).get_device_name(device)
    if dtype != torch.bfloat16:
        raise LookupError(f"the known peak of {name!r} is for bf16, not {dtype}; give metrics.peak_tflops=")
    return table_tflops(name), f"table: {name}"


def table_tflops(name: str) -> float:
    """Peak by a device's name. Raises LookupError for a name that is no entry's, or more than an entry's."""
    words = re.findall(r"\w+", name.lower())
    for entry in sorted(PEAK_TFLOPS, key=lambda entry: len(entry.split()), reverse=True):
        wanted = entry.lower().split()
        for start in range(len(words) - len(wanted) + 1):
            end = start + len(wanted)
            if words[start:end] == wanted and NEUTRAL_WORDS.issuperset(words[:start] + words[end:]):
                return float(PEAK_TFLOPS[entry])
    raise LookupError(f"the peak of {name!r} is not known; give metrics.peak_tflops=")


def measured_tflops(dtype: torch.dtype, budget_s: float = 0.3) -> tuple[float, str]:
    """Best of a few square matmuls on this CPU with the run's threads; multiplies ones, so draws from no RNG."""
    best, spent, n = 0.0, 0.0, 256
    matrix = torch.ones(n, n, dtype=dtype)
    while spent < budget_s:
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        elapsed = time.perf_counter() - start
        best, spent = max(best, 2 * n**3 / elapsed / 1e12), spent + elapsed
        if n < 1024 and 8 * elapsed < budget_s / 4:
            n, best = 2 * n, 0.0
            matrix = torch.ones(n, n, dtype=dtype)
    short = str(dtype).removeprefix("torch.")
    return best, f"measured: {short} matmul {n}x{n}, {torch.get_num_threads()} threads"
