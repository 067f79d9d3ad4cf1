"""Model FLOPs utilisation: right or absent, and never in the way of training.

    meter = make_meter(cfg.metrics, model, device, dtype, world_size)
    meter.record_rollout(groups)                                 # of all ranks: so no collective is needed
    meter.record("update", lengths, logits, training=True)
    metrics |= meter.metrics({"rollout": seconds, "update": seconds, "step": seconds})

MFU = model FLOPs / (seconds x peak of a device x devices), for each recorded phase by that phase's own time.
Any failure (a module that cannot be counted, an error in step 5, a clock that stands still) switches the meter
off: one warning, `perf/mfu_unavailable` = 1 from then on in place of every value, the reason in the summary.
Where only the device's peak is not known, FLOPs and TFLOP/s remain, and what divides by the peak is absent.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from posttrain.config import MetricsConf
from posttrain.flops import FlopsCounter, size
from posttrain.metrics.peaks import peak_tflops
from posttrain.records import Group, MiniBatch, Packed

# Lengths of documents, and how many of their tokens are predicted.
Work = tuple[list[int], int]


class Meter:
    """Counts FLOPs between two calls of `metrics`. `reason` says why there is no MFU, None while there is."""

    def __init__(
        self, conf: MetricsConf, model: nn.Module, device: torch.device, dtype: torch.dtype, devices: int, ahead: bool
    ) -> None:
        self.devices = devices
        self.ahead = ahead  # a step's rollouts are sampled in the time of another one, so they have no rate
        self.reason: str | None = None
        self.peak_tflops: float | None = None
        self.peak_source: str | None = None
        self.counter: FlopsCounter | None = None  # None: off
        self.checkpointing = False
        self._flops: defaultdict[str, float] = defaultdict(float)  # of this step, by phase
        self._hardware = 0.0  # of this step's update, what is recomputed included
        self._trained_flops, self._trained_tokens = 0.0, 0  # of the whole run, for FLOPs a token
        with self._off_on_failure():
            self.peak_tflops, self.peak_source = peak_tflops(conf.peak_tflops, device, dtype)
        with self._off_on_failure():
            self.checkpointing = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
            self.counter = size(model)

    def record(self, phase: str, lengths: Sequence[int], logits: int, training: bool = False) -> None:
        """Bill `phase` for documents of these lengths and for LM head positions, both over all ranks.

        `training` is for the phase "update"; every other is a pass without gradients ("logprobs", "metrics").
        """
        if not self.counter:
            return
        with self._off_on_failure():
            flops = (self.counter.training if training else self.counter.forward)(lengths, logits)
            self._flops[phase] += flops
            if training:
                self._hardware += self.counter.hardware(lengths, logits, self.checkpointing)
                self._trained_flops += flops
                self._trained_tokens += sum(lengths)

    def record_rollout(self, groups: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Bill the phase "rollout" for (prompt length, completion lengths) of each group, over all ranks."""
        if not self.counter:
            return
        with self._off_on_failure():
            self._flops["rollout"] += self.counter.rollout(groups)

    def bill(
        self, batches: Sequence[MiniBatch], updates: int, logprobs: int = 0, sampled: Sequence[Group] = ()
    ) -> None:
        """All that a step does: `updates` and `logprobs` are passes over all its mini-batches."""
        if sampled:
            self.record_rollout(
                [(len(g.problem.prompt_ids), [len(r) - len(g.problem.prompt_ids) for r in g.rollouts]) for g in sampled]
            )
        trained = _work([batch.trained for batch in batches])
        watched = _work([batch.watched for batch in batches if batch.watched])
        for _ in range(logprobs):
            self.record("logprobs", *_both(trained, watched))
        for _ in range(updates):
            self.record("update", *trained, training=True)
        for _ in range(updates if any(watched) else 0):
            self.record("metrics", *watched)

    def metrics(self, seconds: dict[str, float]) -> dict[str, float]:
        """This step's metrics, from the seconds of its phases and of the whole "step"; starts the next step.

        `perf/flops_<phase>`: model FLOPs of each phase over all devices. `perf/mfu`, `perf/hfu` (recomputed
        activations counted too) and `perf/tflops_per_device` are of the phase "update", `perf/mfu_<phase>` of each
        other one, `perf/mfu_step` of everything recorded over the step's time.
        """
        values: dict[str, float] = {}
        if self.counter:
            with self._off_on_failure():
                values = self._rates(seconds)
                if not all(map(math.isfinite, values.values())):
                    raise ArithmeticError(f"not a finite number among {values}")
            self._flops, self._hardware = defaultdict(float), 0.0
        return (values if self.counter else {}) | ({"perf/mfu_unavailable": 1.0} if self.reason else {})

    def _rates(self, seconds: dict[str, float]) -> dict[str, float]:
        def tflops(phase: str, flops: float) -> float:
            if not seconds[phase] > 0:
                raise ArithmeticError(f"by the clock, {phase} took {seconds[phase]} s")
            return flops / seconds[phase] / self.devices / 1e12

        flops = {phase: count for phase, count in self._flops.items() if count}
        values = {f"perf/flops_{phase}": count for phase, count in flops.items()}
        # In the time of this step.
        timed = {phase: count for phase, count in flops.items() if not (self.ahead and phase == "rollout")}
        rates = {f"mfu_{phase}": tflops(phase, count) for phase, count in timed.items() if phase != "update"}
        if "update" in flops:
            rates["mfu"] = values["perf/tflops_per_device"] = tflops("update", flops["update"])
            rates["hfu"] = tflops("update", self._hardware)
        if timed:
            rates["mfu_step"] = tflops("step", sum(timed.values()))
        if self.peak_tflops and rates and (highest := max(rates.values())) > self.peak_tflops:
            self._no_peak(f"{highest:.3g} TFLOP/s a device is above the peak of {self.peak_tflops:.3g}")
        return values | {f"perf/{name}": rate / self.peak_tflops for name, rate in rates.items() if self.peak_tflops}

    def _no_peak(self, found: str) -> None:
        """An MFU above 1 is wrong: the peak, or the clock. What does not divide by the peak remains."""
        self.reason, self.peak_tflops = f"{found}; give metrics.peak_tflops=", None
        logging.getLogger(__name__).warning("no MFU from here on: %s", self.reason)

    def summary(self) -> dict[str, bool | str | float | None]:
        return {
            "available": self.reason is None,
            "reason": self.reason,
            "peak_tflops_per_device": self.peak_tflops,
            "peak_source": self.peak_source,
            "flops_per_token": self._trained_flops / self._trained_tokens if self._trained_tokens else None,
        }

    @contextmanager
    def _off_on_failure(self) -> Iterator[None]:
        """The one place that catches: a metric must not cost a training run, nor vanish without a word.

        Every rank warns: the console shows rank 0, logs/rank<n>.log another, whose failure changes no record.
        """
        try:
            yield
        except Exception as error:
            self.counter = None
            found = f"{type(error).__name__}: {error}"
            self.reason = f"{self.reason}; {found}" if self.reason else found
            logging.getLogger(__name__).warning("no MFU from here on: %s", found)


def make_meter(
    conf: MetricsConf,
    model: nn.Module,
    device: torch.device | str,
    dtype: torch.dtype,
    world_size: int,
    ahead: bool = False,
) -> Meter:
    """A meter for `world_size` devices like this one; `ahead`: sampling runs ahead of the step that it is billed to.

    Never raises: a meter that failed is off.
    """
    return Meter(conf, model, torch.device(device), dtype, world_size, ahead)


def _both(one: Work, other: Work) -> Work:
    return one[0] + other[0], one[1] + other[1]


def _work(packed: Sequence[Packed]) -> Work:
    """Lengths of all documents, and how many of their tokens are predicted."""
    documents = [document for part in packed for document in part.documents]
    return [len(document) for document in documents], sum(document.rollout.trained_tokens for document in documents)
