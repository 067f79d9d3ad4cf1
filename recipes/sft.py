"""Supervised fine-tuning on a task's answers: maximise the likelihood of each answer's tokens.

    python recipes/sft.py model=qwen3_5_dense task=jsonl task.path=train.jsonl

Packing, sharding and normalisation are those of recipes/grpo.py; `make tiny` warm-starts the embedded models with it.
"""

from posttrain.cli import main

if __name__ == "__main__":
    main(__file__)  # reads the config, makes the run directory and starts the ranks, which import this file again

import dataclasses
import time
from pathlib import Path

import torch
import torch.distributed as dist

from posttrain import checkpoint, optim, packing
from posttrain.advantages import token_weights
from posttrain.config import PackingMode, SFTConf
from posttrain.config.loss import Aggregation
from posttrain.data.tasks import batch, make_task
from posttrain.evaluation import evaluate
from posttrain.fsdp import from_all_ranks, make_accelerator, reduce_over_ranks, sharding, synchronise_gradients
from posttrain.logprobs import find_head, token_logprobs
from posttrain.metrics import performance_metrics, timed
from posttrain.models import gdn_packing
from posttrain.models.loading import compute_dtype, describe, end_token_ids, initialise, load
from posttrain.records import Problem, Rollout
from posttrain.tracking import Tracker


def train(cfg: SFTConf, run_dir: Path) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg.seed)
    model, tokenizer = (initialise if cfg.init else load)(cfg.model)
    dtype = compute_dtype(cfg.model)
    accelerator = make_accelerator(cfg.fsdp, model, dtype)
    device, packed = accelerator.device, cfg.packing.mode is PackingMode.thd
    kernels = gdn_packing.patch(model, device, packed=packed)
    proof = gdn_packing.verify(model, device, dtype) if packed and cfg.packing.verify else None
    report, head = dataclasses.asdict(proof or kernels), find_head(model)
    report["kernels"]["logprobs"] = head.description
    task = make_task(cfg.task, tokenizer)
    cost, longest = packing.document_cost(model), packing.longest(model)
    end_ids, pad_id = end_token_ids(model, tokenizer), tokenizer.pad_token_id
    model, optimizer = accelerator.prepare(model, optim.make_optimizer(model, cfg.optim))

    def answer(problem: Problem) -> Rollout:
        """The problem answered right, as the model would have to write it."""
        ids = (*tokenizer(problem.answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)
        return Rollout(
            prompt_ids=problem.prompt_ids,
            completion_ids=ids,
            logprobs=(0.0,) * len(ids),
            finish_reason="stop",
            group=problem.index,
            answer=problem.answer,
        )

    with Tracker(run_dir, cfg.logger, rank == 0, dataclasses.asdict(cfg), cfg.steps) as tracker:
        tracker.start(
            {
                "model": "random weights" if cfg.init else describe(cfg.model),
                "parameters": sum(p.numel() for p in model.parameters()),
                "world_size": world,
                "device": device.type,
                "sharding": sharding(model),
                "packing": {"mode": cfg.packing.mode, "verified": bool(proof), **report},
                "task": {"train": len(task.train), "heldout": len(task.heldout), "dropped": task.dropped},
            }
        )
        skipped = 0  # updates in a row
        for step in range(cfg.steps):
            seconds, began = {}, time.perf_counter()
            with timed(seconds, "update"):
                rollouts = [answer(problem) for problem in batch(task.train, cfg.batch_size, step, cfg.seed)]
                refused = [len(rollout) > longest for rollout in rollouts]  # beyond the model's positions: weight 0
                lengths = [0 if out else len(r.completion_ids) for out, r in zip(refused, rollouts, strict=True)]
                weights = token_weights(lengths, Aggregation.token_mean, max(lengths))
                documents = [
                    packing.Document(rollout=rollout, advantage=1.0, weight=weight, index=n)
                    for n, (rollout, weight) in enumerate(zip(rollouts, weights, strict=True))
                    if weight
                ]
                plan = packing.plan(documents, packing.spare(rollouts[0]), cfg.packing, world, cost)
                optim.set_learning_rate(optimizer, lr := optim.learning_rate(cfg.optim, step, cfg.steps))
                total, token_losses = torch.zeros((), device=device), []
                for n, row in enumerate(plan[rank]):
                    micro_batch = packing.build(row, cfg.packing, pad_id, device)
                    with synchronise_gradients(model, accelerator, last=n + 1 == len(plan[rank])):
                        logprobs_BK, _ = token_logprobs(model, micro_batch, 1.0, head)
                        loss = -(micro_batch.weights_BK * logprobs_BK).sum()
                        accelerator.backward(loss * world)  # gradients are averaged over ranks
                    total += loss.detach()
                    token_losses.append(-logprobs_BK.detach())
                grad_norm = optim.step(accelerator, model, optimizer, total, cfg.optim)
                skipped = skipped + 1 if grad_norm is None else 0
                if skipped:
                    at_fault = from_all_ranks(packing.not_finite(token_losses, plan[rank], cfg.packing))
                    optim.say_skipped(step + 1, skipped, at_fault, cfg.optim)
            seconds["step"] = time.perf_counter() - began
            tokens = sum(map(len, documents))
            metrics = {
                **reduce_over_ranks({"loss": total}, dist.ReduceOp.SUM),
                **packing.statistics([plan], cfg.packing, cost, sum(refused)),
                **performance_metrics(seconds, tokens, device),
                "grad_norm": grad_norm,
                **({"skipped_updates": 1} if skipped else {}),
                "learning_rate": lr,
                "num_tokens": tokens,
            }
            tracker.log(step + 1, metrics)
            last = step + 1 == cfg.steps
            if last or (cfg.evaluation.every and (step + 1) % cfg.evaluation.every == 0):
                held_out = evaluate(model, task, tokenizer, cfg, end_ids)
                tracker.log(step + 1, held_out)
                tracker.summary(evaluation=held_out)
                if cfg.stop_at is not None and held_out.get("eval/rewards/correct", 0.0) >= cfg.stop_at:
                    break

        checkpoint.export(accelerator, model, tokenizer, run_dir / "model")
