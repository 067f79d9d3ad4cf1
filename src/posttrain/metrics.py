"""What a training record says of its step, under the names that the field searches for."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from posttrain.fsdp import reduce_over_ranks
from posttrain.losses import Terms
from posttrain.packing import PackedRow
from posttrain.records import Rollout


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add the seconds spent inside to `seconds[phase]`, work queued on the GPU included."""
    began = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - began


class UpdateMetrics:
    """Sums over the tokens that one step's updates train on, and what they say over all ranks.

    Each optimizer step adds its micro-batches and then ends: the sums of a skipped one are left out.
    """

    def __init__(self) -> None:
        self.skipped = 0
        self._norms: list[float] = []
        self._sums: dict[str, torch.Tensor] = {}
        self._extremes: dict[str, torch.Tensor] = {}
        self._pending: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []

    @torch.no_grad()
    def add(self, row: PackedRow, terms: Terms) -> None:
        trained_BK = row.weights_BK > 0
        gap_BK = (terms.old_logprobs_BK - row.sampled_logprobs_BK).where(trained_BK, 0.0)
        means = {
            **terms.means,
            "sampling/logp_difference/mean": gap_BK.abs(),
            "sampling/importance_sampling_ratio/mean": gap_BK.exp(),
            "sampling/kl": torch.expm1(gap_BK) - gap_BK,  # the k3 estimate of KL(sampler || trainer)
        }
        sums = {name: values_BK.where(trained_BK, 0.0).double().sum() for name, values_BK in means.items()}
        sums["tokens"] = trained_BK.double().sum()
        for name, values_BK in (("loss", terms.loss_BK), ("policy_loss", terms.policy_BK)):
            sums[name] = (row.weights_BK * values_BK).where(trained_BK, 0.0).double().sum()
        nothing = gap_BK.new_tensor(-torch.inf)
        extremes = {"high": gap_BK.where(trained_BK, nothing), "low": (-gap_BK).where(trained_BK, nothing)}
        self._pending.append((sums, {name: values_BK.max().double() for name, values_BK in extremes.items()}))

    def end(self, grad_norm: float | None) -> None:
        """Of an optimizer step; None says that it was skipped."""
        pending, self._pending = self._pending, []
        if grad_norm is None:
            self.skipped += 1
            return
        self._norms.append(grad_norm)
        for sums, extremes in pending:
            for name, value in sums.items():
                self._sums[name] = self._sums.get(name, 0.0) + value
            for name, value in extremes.items():
                self._extremes[name] = torch.maximum(self._extremes.get(name, value), value)

    def over_ranks(self, sampler_known: bool) -> dict[str, float]:
        """Means over tokens of all ranks; loss and gradient norm are means over the optimizer steps that were taken.

        Without `sampler_known` the sampler's distribution is another one on purpose (top_p), and its gap not reported.
        """
        metrics = {"skipped_updates": self.skipped} if self.skipped else {}
        if not self._norms:
            return metrics
        sums = reduce_over_ranks(self._sums, dist.ReduceOp.SUM)
        extremes = reduce_over_ranks(self._extremes, dist.ReduceOp.MAX)
        tokens, steps = sums.pop("tokens"), len(self._norms)
        metrics |= {name: sums.pop(name) / steps for name in ("loss", "policy_loss")}
        metrics["grad_norm"] = sum(self._norms) / steps
        if tokens:  # without any there is no mean
            metrics |= {name: value / tokens for name, value in sums.items()}
            if "clip_ratio/low_mean" in metrics:
                metrics["clip_ratio/region_mean"] = metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]
            metrics["sampling/logp_difference/max"] = max(extremes.values())
            metrics["sampling/importance_sampling_ratio/max"] = math.exp(extremes["high"])
            metrics["sampling/importance_sampling_ratio/min"] = math.exp(-extremes["low"])
        return {name: value for name, value in metrics.items() if sampler_known or not name.startswith("sampling/")}


def reward_metrics(rewards_PG: torch.Tensor, scores: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of the weighted rewards [P, G] and of each reward by name. NaN rewards (unscorable) are left out."""
    spread_P = torch.tensor([_spread(row) for row in rewards_PG.tolist()])
    metrics = {
        "reward": rewards_PG.nanmean().item(),
        "reward_std": spread_P.nanmean().item(),
        "frac_reward_zero_std": (spread_P <= 1e-6).float().mean().item(),
        "frac_reward_unscorable": rewards_PG.isnan().float().mean().item(),
    }
    for name in scores[0].keys() - {"total"}:
        values = torch.tensor([score[name] for score in scores])
        metrics[f"rewards/{name}/mean"] = values.nanmean().item()
        metrics[f"rewards/{name}/std"] = _spread(values.tolist())
    return metrics


def completion_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Lengths in tokens; clipped: reached max_new_tokens without an end token."""
    lengths = [len(rollout.completion_ids) for rollout in rollouts]
    return {
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": sum(not rollout.finished for rollout in rollouts) / len(rollouts),
    }


def performance_metrics(
    seconds: dict[str, float], tokens: int, device: torch.device, warmup: bool = False
) -> dict[str, float]:
    """Time by phase, tokens (prompt and completion, over all ranks) a second, and this rank's peak memory in GB.

    `perf/warmup` marks a step to leave out of averages: the first one of a process, whose time holds compilation, and
    the one after a checkpoint or an evaluation. These run between two steps, in the time of neither (`time/checkpoint`
    and `time/evaluation` are in records of their own), but leave caches and the allocator cold for the next step.
    """
    if device.type == "cuda":
        memory = torch.cuda.max_memory_allocated(device) / 1e9
    else:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return {
        **{f"time/{phase}": spent for phase, spent in seconds.items() if phase != "step"},
        "perf/step_time": seconds["step"],
        **({"perf/tokens_per_second": tokens / seconds["step"]} if seconds["step"] > 0 else {}),
        "perf/max_memory_gb": memory,
        **({"perf/warmup": 1.0} if warmup else {}),
    }


def _spread(values: Sequence[float]) -> float:
    """Standard deviation with Bessel's correction of the values that are not NaN; NaN for fewer than two."""
    known = torch.tensor([value for value in values if value == value], dtype=torch.float64)
    return known.std().item() if len(known) > 1 else float("nan")
