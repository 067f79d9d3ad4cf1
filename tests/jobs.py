"""Several jobs of a recipe one after the other on the same ranks: to start ranks costs more than a small job.

What a command does beyond this (Hydra, the run directory, watching the ranks) has tests of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from conftest import ROOT, SMALL, Run


def run_jobs(directory: Path, *jobs: Sequence[str], nproc: int = 1, fault: str = "", recipe: str = "grpo") -> list[Run]:
    """Each job is a list of overrides, for grpo on top of conftest.SMALL. `fault` names a function of this file."""
    order, base = [], SMALL if recipe == "grpo" else []
    for number, overrides in enumerate(jobs):
        (directory / str(number)).mkdir(parents=True)
        order.append({"recipe": recipe, "values": values(recipe, [*base, *overrides]), "fault": fault})
        order[-1]["run_dir"] = str(directory / str(number))
    (directory / "jobs.json").write_text(json.dumps(order))
    shared = {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc), "CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(directory / "jobs.json")],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(nproc)
    ]
    try:
        outputs = [process.communicate(timeout=280)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    status = max(process.returncode for process in ranks)
    return [Run(directory / str(number), status, "\n".join(outputs)) for number in range(len(jobs))]


def values(recipe: str, overrides: Sequence[str]) -> dict:
    """The plain values of a command line's job."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from posttrain.command import cli

    cli._declare(recipe)
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return OmegaConf.to_container(compose(recipe, list(overrides)), resolve=True, enum_to_str=True)


def nan_on_the_last_rank(recipe) -> None:
    """Its losses of the second optimizer step are NaN. Says whether weights and optimizer state stayed as they were."""
    import torch
    import torch.distributed as dist

    real_terms, real_step, steps = recipe.losses.policy_terms, recipe.optim.step, []

    def terms(logprobs_BK, *rest):
        broken = len(steps) == 1 and dist.get_rank() == dist.get_world_size() - 1
        return real_terms(logprobs_BK * torch.nan if broken else logprobs_BK, *rest)

    def step(accelerator, model, optimizer, *rest):
        def state():
            values = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
            return [(v.to_local() if hasattr(v, "to_local") else v).detach().clone() for v in values]

        before = state()
        norm = real_step(accelerator, model, optimizer, *rest)
        after = state()
        same = len(before) == len(after) and all(map(torch.equal, before, after))
        steps.append(norm)
        print(f"optimizer step {len(steps)} on rank {dist.get_rank()}: taken {norm is not None}, unchanged {same}")
        return norm

    recipe.losses.policy_terms, recipe.optim.step = terms, step


def infinite_gradient_in_the_second_step(recipe) -> None:
    """Its loss is finite."""
    import dataclasses

    import torch

    real, calls = recipe.losses.policy_terms, []

    class Explode(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * torch.inf

    def terms(*arguments):
        found = real(*arguments)
        calls.append(1)
        return dataclasses.replace(found, loss_BK=Explode.apply(found.loss_BK)) if len(calls) == 2 else found

    recipe.losses.policy_terms = terms


def nan_twice_in_a_row_and_again(recipe) -> None:
    """In all optimizer steps but each third, of one micro-batch each."""
    real, calls = recipe.losses.policy_terms, []

    def terms(logprobs_BK, *rest):
        calls.append(1)
        return real(logprobs_BK * float("nan") if len(calls) % 3 else logprobs_BK, *rest)

    recipe.losses.policy_terms = terms


def slow_packing(recipe) -> None:
    import time

    real = recipe.packing.plan
    recipe.packing.plan = lambda *arguments: time.sleep(3) or real(*arguments)


def always_nan(recipe) -> None:
    import torch

    real = recipe.losses.policy_terms
    recipe.losses.policy_terms = lambda logprobs_BK, *rest: real(logprobs_BK * torch.nan, *rest)


def nan_logprobs_in_the_second_step(recipe) -> None:
    real, calls = recipe.token_logprobs, []

    def token_logprobs(*arguments):
        logprobs_BK, entropy_BK = real(*arguments)
        calls.append(1)
        return (logprobs_BK * float("nan") if len(calls) == 2 else logprobs_BK), entropy_BK

    recipe.token_logprobs = token_logprobs


def some_rewards_unscorable(recipe) -> None:
    """Sample 0 of each group cannot be scored, and group 1 has one sample that can."""
    real = recipe.make_task

    def make_task(*arguments):
        task, seen = real(*arguments), {}

        class Broken:
            train, heldout, dropped = task.train, task.heldout, task.dropped

            @staticmethod
            def score(rollout, tokenizer):
                sample = seen[rollout.group] = seen.get(rollout.group, -1) + 1
                scores = task.score(rollout, tokenizer)
                return scores | {"total": float("nan")} if sample == 0 or rollout.group == 1 and sample < 3 else scores

        return Broken

    recipe.make_task = make_task


def empty_completions(recipe) -> None:
    """As an engine returns them that strips the end token: every third completion."""
    import dataclasses

    real = recipe.generate

    def generate(*arguments, **options):
        return [
            dataclasses.replace(r, completion_ids=(), logprobs=()) if n % 3 == 0 else r
            for n, r in enumerate(real(*arguments, **options))
        ]

    recipe.generate = generate


def rewards_seen(recipe) -> None:
    """Prints the rewards that each step computes advantages of."""
    real = recipe.advantages

    def advantages(rewards_PG, *rest):
        print("rewards", rewards_PG.tolist())
        return real(rewards_PG, *rest)

    recipe.advantages = advantages


def main(order: Path) -> None:
    import torch
    import torch.distributed as dist
    from accelerate.state import AcceleratorState

    from posttrain.command import rank
    from posttrain.config.rules import problems
    from posttrain.config.validation import typed

    torch.set_num_threads(1)
    store = dist.FileStore(str(order.with_name("store")), int(os.environ["WORLD_SIZE"]))  # no port to race for
    rank.start_process_group(120, store)
    for job in json.loads(order.read_text()):
        recipe = rank._import(ROOT / "recipes" / f"{job['recipe']}.py")
        cfg = typed(job["recipe"], job["values"])
        assert not problems(cfg, dist.get_world_size()), problems(cfg, dist.get_world_size())
        if job["fault"]:
            globals()[job["fault"]](recipe)
        recipe.train(cfg, Path(job["run_dir"]))
        AcceleratorState._reset_state(reset_partial_state=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
