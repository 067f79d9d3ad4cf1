"""What a training record says of its step, under the names that the field searches for."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from posttrain.advantages import informative, overlong_penalty
from posttrain.config import GRPOConf
from posttrain.losses import Terms
from posttrain.records import Group, PackedRow
from posttrain.training.fsdp import reduce_over_ranks


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add the seconds spent inside to `seconds[phase]`, work queued on the GPU included."""
    began = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - began


class TokenSums:
    """Sums and extremes over tokens, from which their means over all ranks are made."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.extremes: dict[str, torch.Tensor] = {}

    def add(self, sums: dict[str, torch.Tensor], extremes: dict[str, torch.Tensor]) -> None:
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        for name, value in extremes.items():
            self.extremes[name] = torch.maximum(self.extremes.get(name, value), value)

    def over_ranks(self) -> dict[str, float]:
        """The means, and the range of the sampler's gap; without a token there is none."""
        sums = reduce_over_ranks(self.sums, dist.ReduceOp.SUM)
        extremes = reduce_over_ranks(self.extremes, dist.ReduceOp.MAX)
        if not (tokens := sums.pop("tokens")):
            return {}
        found = {name: value / tokens for name, value in sums.items()}
        if "clip_ratio/low_mean" in found:
            found["clip_ratio/region_mean"] = found["clip_ratio/low_mean"] + found["clip_ratio/high_mean"]
        found["sampling/logp_difference/max"] = max(extremes.values())
        found["sampling/importance_sampling_ratio/max"] = math.exp(extremes["high"])
        found["sampling/importance_sampling_ratio/min"] = math.exp(-extremes["low"])
        return found


class UpdateMetrics:
    """What one step's updates say over all ranks: losses, gradient norms, and means over tokens.

    `entropy` and the other means of tokens are over all tokens that count. A token of a completion with advantage 0 has
    no gradient, and is computed in some steps only: a step is `complete` if every token was, else it has no such mean.
    Means over the tokens that have a gradient are named trained/entropy and so on, and are in every step, unless all
    tokens `always` have one. Each optimizer step adds its micro-batches and then ends: a skipped one adds nothing.
    """

    def __init__(self, complete: bool, always: bool) -> None:
        self.complete = complete
        self.always = always
        self.skipped = 0
        self._norms: list[float] = []
        self._losses = TokenSums()
        self._trained = TokenSums()
        self._counted = TokenSums()
        self._pending: list[tuple[TokenSums, dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []

    @torch.no_grad()
    def add(self, row: PackedRow, terms: Terms, trained: bool = True) -> None:
        """One micro-batch, of documents that are `trained` on or only looked at."""
        counted_BK = row.weights_BK > 0
        gap_BK = (terms.old_logprobs_BK - row.sampled_logprobs_BK).where(counted_BK, 0.0)
        means = {
            **terms.means,
            "sampling/logp_difference/mean": gap_BK.abs(),
            "sampling/importance_sampling_ratio/mean": gap_BK.exp(),
            # The k3 estimate of KL(sampler || trainer).
            "sampling/kl": torch.expm1(gap_BK) - gap_BK,
        }
        sums = {name: values_BK.where(counted_BK, 0.0).double().sum() for name, values_BK in means.items()}
        sums["tokens"] = counted_BK.double().sum()
        # Tokens that do not count must not be the largest, on any rank.
        nothing = gap_BK.new_tensor(-torch.inf)
        extremes = {"high": gap_BK.where(counted_BK, nothing), "low": (-gap_BK).where(counted_BK, nothing)}
        highest = {name: values_BK.max().double() for name, values_BK in extremes.items()}
        self._pending.append((self._counted, sums, highest))
        if trained:
            losses = {
                name: (row.weights_BK * values_BK).where(counted_BK, 0.0).double().sum()
                for name, values_BK in (("loss", terms.loss_BK), ("policy_loss", terms.policy_BK))
            }
            self._pending += [(self._trained, sums, highest), (self._losses, losses, {})]

    def end(self, grad_norm: float | None) -> None:
        """Of an optimizer step; None says that it was skipped."""
        pending, self._pending = self._pending, []
        if grad_norm is None:
            self.skipped += 1
            return
        self._norms.append(grad_norm)
        for into, sums, extremes in pending:
            into.add(sums, extremes)

    def over_ranks(self, sampler_known: bool) -> dict[str, float]:
        """Means over tokens of all ranks; loss and gradient norm are means over the optimizer steps that were taken.

        Without `sampler_known` the sampler's distribution is another one on purpose (top_p), and its gap not reported.
        """
        metrics: dict[str, float] = {"skipped_updates": self.skipped} if self.skipped else {}
        if not self._norms:
            return metrics
        steps = len(self._norms)
        losses = reduce_over_ranks(self._losses.sums, dist.ReduceOp.SUM)
        metrics |= {name: value / steps for name, value in losses.items()}
        metrics["grad_norm"] = sum(self._norms) / steps
        of_tokens: dict[str, float] = {}
        if self.complete:
            of_tokens |= self._counted.over_ranks()
        if not self.always:
            of_tokens |= {f"trained/{name}": value for name, value in self._trained.over_ranks().items()}
        for name, value in of_tokens.items():
            if sampler_known or "sampling/" not in name:
                metrics[name] = value
        return metrics


def reward_metrics(groups: Sequence[Group], rewards_PG: torch.Tensor) -> dict[str, float]:
    """Of the rewards [P, G] that are compared, and of each reward by name. NaN (unscorable) is left out."""
    spread_P = torch.tensor([_spread(row) for row in rewards_PG.tolist()])
    metrics = {
        "reward": rewards_PG.nanmean().item(),
        "reward_std": spread_P.nanmean().item(),
        "frac_reward_zero_std": (~informative(rewards_PG) & ~spread_P.isnan()).float().mean().item(),
        "frac_reward_unscorable": rewards_PG.isnan().float().mean().item(),
    }
    names = dict.fromkeys(name for group in groups for name in group.scores if name != "total")
    for name in names:
        values = torch.tensor([score for group in groups for score in group.scores.get(name, ())])
        metrics[f"rewards/{name}/mean"] = values.nanmean().item()
        metrics[f"rewards/{name}/std"] = _spread(values.tolist())
    reasons = [why.partition(":")[0] for group in groups for failed in group.failed for why in failed.values()]
    metrics |= {f"reward_failures/{reason}": reasons.count(reason) for reason in dict.fromkeys(reasons)}
    return metrics


def completion_metrics(groups: Sequence[Group], step: int, cfg: GRPOConf) -> dict[str, float]:
    """Of all that was sampled. Lengths: tokens that the model wrote. Clipped: no end token within the room for them.

    Staleness: steps between the weights that sampled a completion's oldest token and those that it trains.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [rollout.written_tokens for rollout in rollouts]
    metrics: dict[str, float] = {
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": sum(not rollout.finished for rollout in rollouts) / len(rollouts),
        "num_tokens": sum(map(len, rollouts)),
    }
    if cfg.algorithm.overlong.buffer:
        trained_PG = torch.tensor([group.trained_tokens for group in groups])
        penalty_PG = overlong_penalty(trained_PG, cfg.rollout.max_new_tokens, cfg.algorithm.overlong)
        metrics["rewards/overlong/mean"] = penalty_PG.mean().item()
    if cfg.algorithm.dynamic_sampling:
        metrics["dynamic_sampling/prompts"] = len(groups)
    if cfg.rollout.max_staleness:
        oldest = [min((v for v in rollout.versions if v >= 0), default=step) for rollout in rollouts]
        metrics["rollout/staleness"] = sum(step - version for version in oldest) / len(oldest)
    return metrics


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
