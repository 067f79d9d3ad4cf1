"""What a training record says of its step, under the names that the field searches for."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from posttrain.records import Rollout


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add the seconds spent inside to `seconds[phase]`, work queued on the GPU included."""
    began = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - began


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
