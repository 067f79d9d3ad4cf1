"""Several jobs of a recipe one after the other on the same ranks: to start ranks costs more than a small job.

What a command does beyond this (Hydra, the run directory, watching the ranks) has tests of its own.

A fault is a function of this file: it makes the recipe's `prepare`, `make_task` or SAMPLERS give a policy, a task or a
sampler that misbehaves, or one that says what it is asked for. The recipe's own mathematics is never replaced.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from conftest import ROOT, SMALL, Run
from ranks import on_ranks

from posttrain.config import SamplerName
from posttrain.records import Rollout
from posttrain.rewards.scorer import Scored
from posttrain.rollout.sampler import SAMPLERS, Local
from posttrain.tasks import Task
from posttrain.training.policy import Policy


def run_jobs(directory: Path, *jobs: Sequence[str], nproc: int = 1, fault: str = "", recipe: str = "grpo") -> list[Run]:
    """Each job is a list of overrides, for grpo on top of conftest.SMALL. `fault` names a function of this file."""
    order, base = [], SMALL if recipe == "grpo" else []
    for number, overrides in enumerate(jobs):
        (directory / str(number)).mkdir(parents=True)
        order.append({"recipe": recipe, "values": values(recipe, [*base, *overrides]), "fault": fault})
        order[-1]["run_dir"] = str(directory / str(number))
    status, output = on_ranks(nproc, do, order)
    return [Run(directory / str(number), status, output) for number in range(len(jobs))]


def values(recipe: str, overrides: Sequence[str]) -> dict:
    """The plain values of a command line's job."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from posttrain.command import cli
    from posttrain.command.shorthand import spelled_out

    cli._declare(recipe)
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return OmegaConf.to_container(compose(recipe, spelled_out(overrides)), resolve=True, enum_to_str=True)


class WatchedOptimizer:
    """Counts optimizer steps, and says of each whether it was taken, and whether weights and state stayed as is."""

    def __init__(self, policy: Policy) -> None:
        self.model, self.optimizer = policy.model, policy.optimizer
        self.ended, self.taken, self.before = 0, False, self._state()

    def __getattr__(self, name: str):
        return getattr(self.optimizer, name)

    def _state(self) -> list[torch.Tensor]:
        held = [*self.model.parameters(), *(v for s in self.optimizer.state.values() for v in s.values())]
        return [(v.to_local() if hasattr(v, "to_local") else v).detach().clone() for v in held]

    def step(self) -> None:
        self.taken = True
        self.optimizer.step()

    def zero_grad(self) -> None:
        # Each optimizer step ends with this call, also one that is skipped.
        self.optimizer.zero_grad()
        before, self.before = self.before, self._state()
        same = len(before) == len(self.before) and all(map(torch.equal, before, self.before))
        self.ended += 1
        print(f"optimizer step {self.ended} on rank {dist.get_rank()}: taken {self.taken}, unchanged {same}")
        self.taken = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Watched(Policy):
    """A policy whose logprobs go through `change`, with the number of the optimizer step, from 1."""

    change: Callable[[torch.Tensor, int], torch.Tensor] = lambda logprobs_BK, number: logprobs_BK

    def logprobs(self, row, entropy_gradient=False):
        logprobs_BK, entropy_BK = Policy.logprobs(self, row, entropy_gradient)
        return self.change(logprobs_BK, self.optimizer.ended + 1), entropy_BK

    def pack(self, documents, *options):
        by_group: dict[int, list[float]] = {}
        for document in documents:
            by_group.setdefault(document.rollout.group, []).append(document.advantage)
        print("advantages", json.dumps(list(by_group.values())))
        asked = [(d.rollout.group, d.rollout.ids[: d.rollout.turns[0][0]]) for d in documents]
        print("prompts", json.dumps(sorted(set(asked))))
        return Policy.pack(self, documents, *options)


def watch_policy(recipe: ModuleType, kind: type[Watched] = Watched, **options) -> None:
    """The recipe's policy becomes one of this kind."""
    prepare = recipe.prepare

    def watched(cfg) -> Watched:
        policy = prepare(cfg)
        learner = dataclasses.replace(policy.learner, optimizer=WatchedOptimizer(policy))
        held = {field.name: getattr(policy, field.name) for field in dataclasses.fields(Policy)}
        return kind(**held | {"learner": learner} | options)

    recipe.prepare = watched


def watched_policy(recipe: ModuleType) -> None:
    """No fault: says what each optimizer step is asked for, and what it did."""
    watch_policy(recipe)


def nan_on_the_last_rank(recipe: ModuleType) -> None:
    """Its logprobs, and so its losses, of the second optimizer step are NaN."""

    def change(logprobs_BK, number):
        broken = number == 2 and dist.get_rank() == dist.get_world_size() - 1
        return logprobs_BK * torch.nan if broken else logprobs_BK

    watch_policy(recipe, change=change)


def infinite_loss_on_the_last_rank(recipe: ModuleType) -> None:
    """In the second optimizer step. The gradient of fine-tuning, whose loss is the logprob itself, stays finite."""

    def change(logprobs_BK, number):
        broken = number == 2 and dist.get_rank() == dist.get_world_size() - 1
        return logprobs_BK + torch.inf if broken else logprobs_BK

    watch_policy(recipe, change=change)


class Explode(torch.autograd.Function):
    """The same value, and a gradient that is not finite."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.inf


def infinite_gradient_in_the_second_step(recipe: ModuleType) -> None:
    """Its loss is finite."""
    watch_policy(recipe, change=lambda logprobs, number: Explode.apply(logprobs) if number == 2 else logprobs)


def nan_twice_in_a_row_and_again(recipe: ModuleType) -> None:
    """In all optimizer steps but each third."""
    watch_policy(recipe, change=lambda logprobs, number: logprobs * torch.nan if number % 3 else logprobs)


def nan_in_the_second_step(recipe: ModuleType) -> None:
    watch_policy(recipe, change=lambda logprobs, number: logprobs * torch.nan if number == 2 else logprobs)


def always_nan(recipe: ModuleType) -> None:
    watch_policy(recipe, change=lambda logprobs, number: logprobs * torch.nan)


class SlowToPack(Watched):
    def pack(self, documents, *options):
        time.sleep(3)
        return Watched.pack(self, documents, *options)


def slow_packing(recipe: ModuleType) -> None:
    watch_policy(recipe, SlowToPack)


class SometimesUnscorable(Task):
    """Of each training group sample 0 cannot be scored, and of group 1 only one sample can."""

    def score(self, answered):
        return [self._broken(*each, *scored) for each, scored in zip(answered, Task.score(self, answered), strict=True)]

    def _broken(self, problem, rollout, scores, failed):
        shown = self.train[problem.index] == problem
        broken = rollout.sample == 0 or rollout.group == 1 and rollout.sample < 3
        return Scored(scores | {"total": float("nan")} if shown and broken else scores, failed)


def some_rewards_unscorable(recipe: ModuleType) -> None:
    make_task = recipe.make_task

    def broken(*arguments):
        task = make_task(*arguments)
        return SometimesUnscorable(**{field.name: getattr(task, field.name) for field in dataclasses.fields(Task)})

    recipe.make_task = broken


class Stripping(Local):
    """Returns completions as an engine does that strips the end token: every third is empty."""

    def collect(self, ticket):
        return [self._stripped(r) if n % 3 == 0 else r for n, r in enumerate(Local.collect(self, ticket))]

    @staticmethod
    def _stripped(rollout: Rollout) -> Rollout:
        first, _ = rollout.turns[0]
        return Rollout.one_turn(
            prompt_ids=rollout.ids[:first],
            completion_ids=(),
            logprobs=(),
            finish_reason=rollout.finish_reason,
            group=rollout.group,
            sample=rollout.sample,
        )


def empty_completions(recipe: ModuleType) -> None:
    SAMPLERS[SamplerName.local] = Stripping


class Told(Local):
    """Says what it is asked for, and of which weights it samples."""

    def submit(self, problems, step):
        asked = {place: problem.index for place, problem in problems.items()}
        print(
            f"asked on rank {dist.get_rank()}", json.dumps({"step": step, "problems": asked, "version": self.version})
        )
        return Local.submit(self, problems, step)

    def collect(self, ticket):
        rollouts = Local.collect(self, ticket)
        versions = sorted({version for rollout in rollouts for version in rollout.versions if version >= 0})
        print(f"collected on rank {dist.get_rank()}", json.dumps(versions))
        return rollouts


def told_sampler(recipe: ModuleType) -> None:
    """No fault: says what the sampler is asked for."""
    SAMPLERS[SamplerName.local] = Told


def do(order: list[dict]) -> None:
    """On each rank: the jobs one after the other."""
    from accelerate.state import AcceleratorState

    from posttrain.command import rank
    from posttrain.config.rules import problems
    from posttrain.config.validation import typed

    for job in order:
        recipe = rank._import(ROOT / "recipes" / f"{job['recipe']}.py")
        cfg = typed(job["recipe"], job["values"])
        assert not problems(cfg, dist.get_world_size()), problems(cfg, dist.get_world_size())
        if job["fault"]:
            globals()[job["fault"]](recipe)
        recipe.train(cfg, Path(job["run_dir"]))
        AcceleratorState._reset_state(reset_partial_state=True)
