"""Measure a model on a task's held-out problems, without training.

python recipes/evaluate.py model.path=outputs/grpo/<run>/model
"""

from posttrain.command.cli import main

if __name__ == "__main__":
    # Starts the ranks. Each of them imports this file again, and calls train().
    main(__file__)

import time
from pathlib import Path

import torch.distributed as dist

from posttrain.config import EvaluateConf, LoggerConf, LoggerName
from posttrain.errors import UserError
from posttrain.rollout.evaluation import evaluate
from posttrain.rollout.probe import prove_sampler
from posttrain.tasks import make_task
from posttrain.tracking.tracker import Tracker
from posttrain.training.policy import prepare


def train(cfg: EvaluateConf, run_dir: Path) -> None:
    policy = prepare(cfg)
    task = make_task(cfg.task, policy.tokenizer, policy.vocabulary, cfg.reward)
    if not task.heldout:
        raise UserError(f"task={cfg.task.name} has no held-out problem to evaluate on")
    logger, main_rank = LoggerConf(name=LoggerName.none), dist.get_rank() == 0
    with Tracker(run_dir, logger, main_rank, total_steps=0) as tracker:
        world, size = dist.get_world_size(), len(task.heldout)
        rows = {"heldout": size, "dropped": dict(task.dropped)}
        said = {"task": rows, "template": task.template.facts()}
        said["sampler"] = prove_sampler(policy, cfg)
        tracker.start({**policy.facts, "world_size": world, **said})
        began = time.perf_counter()
        held_out = evaluate(policy, task, cfg)
        seconds = time.perf_counter() - began
        tracker.log(0, held_out | {"time/evaluation": seconds})
        tracker.summary(evaluation=held_out)
