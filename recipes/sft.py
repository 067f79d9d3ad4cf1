"""Supervised fine-tuning on a task's answers: maximise the likelihood of their tokens.

    python recipes/sft.py model=qwen3_5_dense task=jsonl task.path=train.jsonl

It shares packing, sharding, normalisation, checkpoints and metrics with
recipes/grpo.py. `make tiny` warm-starts the embedded models with this recipe.

Shape suffixes (CONTRIBUTING.md has them all): B rows of a micro-batch, K tokens of
it that are predicted.
"""

from posttrain.command.cli import main

if __name__ == "__main__":
    # Starts the ranks. Each of them imports this file again, and calls train().
    main(__file__)

import math
from pathlib import Path

import torch
import torch.distributed as dist

from posttrain.advantages import token_weights
from posttrain.config import SFTConf
from posttrain.config.algorithm import Aggregation
from posttrain.records import Document, MiniBatch, Problem, Rollout
from posttrain.run import Run
from posttrain.tasks import answer_ids, batch, make_task
from posttrain.training import optim
from posttrain.training.fsdp import reduce_over_ranks, synchronise_gradients
from posttrain.training.policy import Policy, prepare


def train(cfg: SFTConf, run_dir: Path) -> None:
    policy = prepare(cfg)
    task = make_task(cfg.task, policy.tokenizer, policy.vocabulary, cfg.reward)
    if policy.row_limit < math.inf:
        # Some models compute something else beyond a length: the data has it, or not.
        policy.refuse_longer_rows(max(len(answered(0, p, policy)) for p in task.train))

    with Run(cfg, run_dir, policy, task) as run:
        for step in run.steps():
            # ---- Update.
            with run.timed("update"):
                problems = batch(task.train, cfg.batch_size, step, cfg.seed)
                mini_batch = policy.pack(documents(problems, policy))
                rate = optim.learning_rate(cfg.optim, step, cfg.steps)
                optim.set_learning_rate(policy.optimizer, rate)
                norm, loss, token_losses = update(mini_batch, policy, cfg)
                indices = [problem.index for problem in problems]
                run.count_skipped(norm, token_losses, mini_batch, indices)

            # ---- Record.
            run.bill([mini_batch])
            metrics = reduce_over_ranks({"loss": loss}, dist.ReduceOp.SUM)
            metrics |= policy.packing_metrics([mini_batch])
            metrics |= {"skipped_updates": 1} if norm is None else {"grad_norm": norm}
            metrics["learning_rate"] = rate
            metrics["num_tokens"] = sum(map(len, mini_batch.trained.documents))
            run.log(metrics)

            # ---- Pause.
            # An evaluation that reaches stop_at ends the steps.
            if run.due(cfg.evaluation.every):
                run.evaluate()
            if run.due(cfg.checkpoint.every):
                run.save()
        run.finish()


def documents(problems: list[Problem], policy: Policy) -> list[Document]:
    """Each problem answered right, weighted for the mean over all answer tokens.

    Documents beyond the model's positions weigh 0.
    """
    rollouts, counted = [], []
    for place, problem in enumerate(problems):
        rollout = answered(place, problem, policy)
        rollouts.append(rollout)
        fits = len(rollout) <= policy.longest
        counted.append(rollout.trained_tokens if fits else 0)
    weights = token_weights(counted, Aggregation.token_mean, max(counted))
    found = []
    for index, (rollout, weight) in enumerate(zip(rollouts, weights, strict=True)):
        found.append(
            Document(rollout=rollout, advantage=1.0, weight=weight, index=index)
        )
    return found


def answered(place: int, problem: Problem, policy: Policy) -> Rollout:
    """The problem and its answer, as the model would have to write it."""
    ids = answer_ids(problem, policy.tokenizer)
    ids = [*ids, policy.tokenizer.eos_token_id]
    return Rollout.one_turn(
        prompt_ids=problem.prompt_ids,
        completion_ids=ids,
        logprobs=[0.0] * len(ids),
        finish_reason="stop",
        group=place,
    )


def update(
    mini_batch: MiniBatch, policy: Policy, cfg: SFTConf
) -> tuple[float | None, torch.Tensor, list[torch.Tensor]]:
    """One optimizer step: the gradient's norm (None: skipped), this rank's part of the
    loss, and the token losses [B, K] of its micro-batches."""
    total, token_losses = torch.zeros((), device=policy.device), []
    rows = mini_batch.trained.rows
    for n, row in enumerate(rows):
        last = n + 1 == len(rows)
        with synchronise_gradients(policy.model, policy.accelerator, last):
            logprobs_BK, _ = policy.logprobs(row)
            loss = -(row.weights_BK * logprobs_BK).sum()
            # The ranks' gradients are averaged, and are to be summed.
            policy.accelerator.backward(loss * dist.get_world_size())
        total += loss.detach()
        token_losses.append(-logprobs_BK.detach())
    norm = optim.step(
        policy.accelerator, policy.model, policy.optimizer, total, cfg.optim
    )
    return norm, total, token_losses
