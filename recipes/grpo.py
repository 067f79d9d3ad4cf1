"""GRPO: group relative policy optimisation (DeepSeekMath, arXiv:2402.03300), on accelerate's FSDP2.

    python recipes/grpo.py model=qwen3_5_dense packing=thd
    python recipes/grpo.py -m fsdp=full_shard,shard_grad_op,hybrid_shard,no_shard launch.nproc=4

For each step: sample G completions of each of P prompts; reward each; its advantage is its reward relative to its
group; raise the probability of its tokens in proportion, clipped as in PPO. What is left out of the paper's version:
the KL penalty and its reference model (coefficient 0 is today's practice), and the critic, which GRPO has none of.
What is on by default and not in the paper: DAPO's token-level mean and its higher upper clip.

Shape suffixes: P prompts, G samples of a prompt, B rows of a micro-batch, K tokens of it that are predicted.
"""

from posttrain.cli import main

if __name__ == "__main__":
    main(__file__)  # reads the config, makes the run directory and starts the ranks, which import this file again

import dataclasses
import math
import time
from pathlib import Path

import torch
import torch.distributed as dist

from posttrain import checkpoint, losses, optim, packing
from posttrain.config import GRPOConf, MetricsName, PackingMode
from posttrain.data.tasks import batch, make_task
from posttrain.evaluation import evaluate
from posttrain.fsdp import (
    from_all_ranks,
    gathered,
    make_accelerator,
    reduce_over_ranks,
    sharding,
    synchronise_gradients,
)
from posttrain.logprobs import token_logprobs
from posttrain.metrics import completion_metrics, performance_metrics, reward_metrics, timed
from posttrain.models import gdn_packing
from posttrain.models.loading import compute_dtype, describe, end_token_ids, load
from posttrain.rollout.local import generate
from posttrain.tracking import Tracker, truncate_after


def train(cfg: GRPOConf, run_dir: Path) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg.seed)

    # Model, with the packing patch: documents of one row must not see each other, also not through the recurrent
    # state of Gated DeltaNet layers. The probe shows that they do not, or stops the run.
    model, tokenizer = load(cfg.model)
    dtype = compute_dtype(cfg.model)
    accelerator = make_accelerator(cfg.fsdp, model, dtype)
    device, packed = accelerator.device, cfg.packing.mode is PackingMode.thd
    kernels = gdn_packing.patch(model, device, packed=packed)
    proof = gdn_packing.verify(model, device, dtype) if packed and cfg.packing.verify else None
    report = dataclasses.asdict(proof or kernels)

    task = make_task(cfg.task, tokenizer)
    cost, longest = packing.document_cost(model), packing.longest(model)
    report["warnings"] += packing.short_of_room(task.train, cfg.rollout.max_new_tokens, longest)
    end_ids, pad_id = end_token_ids(model, tokenizer), tokenizer.pad_token_id
    model, optimizer = accelerator.prepare(model, optim.make_optimizer(model, cfg.optim))
    meter = None
    if cfg.metrics.name is MetricsName.mfu:
        from posttrain.mfu import make_meter  # metrics=none does without

        meter = make_meter(cfg.metrics, model, device, dtype, world)
    resumed = checkpoint.find(cfg.resume, run_dir)
    start = checkpoint.load(accelerator, model, resumed) if resumed else 0
    if checkpoint.nothing_left(cfg.resume, start, cfg.steps):
        return
    if rank == 0:
        truncate_after(run_dir, start)

    with Tracker(run_dir, cfg.logger, rank == 0, dataclasses.asdict(cfg), cfg.steps) as tracker:
        facts = {
            "model": describe(cfg.model),
            "parameters": sum(p.numel() for p in model.parameters()),
            "world_size": world,
            "device": device.type,
            "sharding": sharding(model),
            "packing": {"mode": cfg.packing.mode, "verified": bool(proof), **report},
            "task": {"train": len(task.train), "heldout": len(task.heldout), "dropped": task.dropped},
            "mfu": meter.summary() if meter else {"available": False, "reason": "metrics=none"},
            "resumed_from": str(resumed) if resumed else None,
        }
        tracker.start(facts)
        warmup = True  # the first step compiles, and one after a pause finds caches cold
        for step in range(start, cfg.steps):
            seconds, began = {}, time.perf_counter()

            # Rollouts: this rank samples its share of the prompts, then every rank knows all samples.
            with timed(seconds, "rollout"):
                prompts = list(enumerate(batch(task.train, cfg.prompts_per_step, step, cfg.seed)))
                with gathered(model) as bare:
                    mine = generate(
                        bare, prompts[rank::world], cfg.rollout, key=(0, cfg.seed, step), end_ids=end_ids, pad_id=pad_id
                    )
                dist.barrier()  # the phase ends when the slowest rank ends it
            with timed(seconds, "reward"):
                scored = from_all_ranks([(rollout, task.score(rollout, tokenizer)) for rollout in mine])
                scored.sort(key=lambda pair: pair[0].group)  # stable: the samples of a group stay in order
                rollouts, scores = [r for r, _ in scored], [s for _, s in scored]

            # Advantages. A completion whose reward is NaN could not be scored, and one beyond the model's positions is
            # refused: weight 0.
            rewards_PG = torch.tensor([s["total"] for s in scores]).view(-1, cfg.rollout.group_size)
            advantages = losses.advantages(rewards_PG, cfg.loss.advantage_scale).flatten().tolist()
            refused = [len(r) > longest for r in rollouts]
            weights = losses.token_weights(
                [
                    0 if math.isnan(a) or out else len(r.completion_ids)
                    for a, out, r in zip(advantages, refused, rollouts, strict=True)
                ],
                cfg.loss.aggregation,
                cfg.rollout.max_new_tokens,
            )

            # Packed update: the loss is the sum over all tokens of all ranks of weight * token loss. Documents whose
            # advantage is 0 add nothing to it but count in the weights: they are not computed.
            with timed(seconds, "update"):
                documents = [
                    packing.Document(rollout=r, advantage=a, weight=w, index=n)
                    for n, (r, a, w) in enumerate(zip(rollouts, advantages, weights, strict=True))
                    if w and a
                ]
                plan = packing.plan(documents, packing.spare(rollouts[0]), cfg.packing, world, cost)
                micro_batches = [packing.build(row, cfg.packing, pad_id, device) for row in plan[rank]]
                optim.set_learning_rate(optimizer, lr := optim.learning_rate(cfg.optim, step, cfg.steps))
                trained, old_logprobs = {}, None  # of the policy that sampled: those of the first update, before it
                for _ in range(cfg.loss.updates_per_rollout):
                    last, old_logprobs = update(accelerator, model, optimizer, micro_batches, old_logprobs, cfg)
                    trained |= last

            metrics = {
                **reward_metrics(rewards_PG, scores),
                **completion_metrics(rollouts),
                **trained,
                **packing.statistics(plan, cfg.packing, cost, sum(refused)),
                "learning_rate": lr,
                "num_tokens": sum(map(len, rollouts)),
            }
            if meter:
                groups = [
                    rollouts[n : n + cfg.rollout.group_size] for n in range(0, len(rollouts), cfg.rollout.group_size)
                ]
                meter.record_rollout([(len(g[0].prompt_ids), [len(r.completion_ids) for r in g]) for g in groups])
                predicted = sum(len(d.rollout.completion_ids) for d in documents)
                for _ in range(cfg.loss.updates_per_rollout):
                    meter.record("update", [len(d) for d in documents], predicted, training=True)
            seconds["step"] = time.perf_counter() - began
            metrics |= performance_metrics(seconds, metrics["num_tokens"], device, warmup)
            metrics |= meter.metrics(seconds) if meter else {}
            tracker.log(step + 1, metrics)
            if meter and meter.reason != facts["mfu"]["reason"]:  # it failed in this step
                facts["mfu"] = meter.summary()
                tracker.summary(mfu=facts["mfu"])

            pauses: dict[str, float] = {}  # between two steps, in the time of neither
            if cfg.evaluation.every and (step + 1) % cfg.evaluation.every == 0 and step + 1 < cfg.steps:
                with timed(pauses, "evaluation"):
                    held_out = evaluate(model, task, tokenizer, cfg, end_ids)
                tracker.log(step + 1, held_out and held_out | {"time/evaluation": pauses["evaluation"]})
            if cfg.checkpoint.every and (step + 1) % cfg.checkpoint.every == 0:  # after the records that it stands for
                with timed(pauses, "checkpoint"):
                    checkpoint.save(accelerator, model, run_dir, step + 1, cfg.checkpoint.keep)
                tracker.log(step + 1, {"time/checkpoint": pauses["checkpoint"]})
            warmup = bool(pauses)

        with timed(pauses := {}, "evaluation"):
            held_out = evaluate(model, task, tokenizer, cfg, end_ids)
        tracker.log(cfg.steps, held_out and held_out | {"time/evaluation": pauses["evaluation"]})
        tracker.summary(evaluation=held_out)
        if cfg.checkpoint.export:
            checkpoint.export(accelerator, model, tokenizer, run_dir / "model")
        if meter:
            tracker.summary(mfu=meter.summary())


def update(accelerator, model, optimizer, micro_batches, old_logprobs, cfg: GRPOConf):
    """One optimizer step on this rank's micro-batches, of which every rank has equally many.

    Returns the step's metrics over all ranks, and the logprobs [B, K] of each micro-batch before the step if
    `old_logprobs` is None, else `old_logprobs`.
    """
    total: dict[str, torch.Tensor] = {}
    gaps = torch.zeros(2, device=accelerator.device)  # the largest log-ratio of trainer to sampler, and minus the least
    before_update = []
    for n, row in enumerate(micro_batches):
        with synchronise_gradients(model, accelerator, last=n + 1 == len(micro_batches)):
            logprobs_BK, entropy_BK = token_logprobs(model, row, cfg.rollout.temperature)
            before_update.append(logprobs_BK.detach())
            old_BK = logprobs_BK.detach() if old_logprobs is None else old_logprobs[n]
            losses_BK, low_BK, high_BK = losses.clipped_surrogate(logprobs_BK, old_BK, row.advantages_BK, cfg.loss)
            loss = (row.weights_BK * losses_BK).sum()
            accelerator.backward(loss * accelerator.num_processes)  # gradients are averaged over ranks

        counts_BK = row.weights_BK > 0
        gap_BK = (logprobs_BK.detach() - row.sampled_logprobs_BK).where(counts_BK, 0.0)
        gaps = torch.maximum(gaps, torch.stack([gap_BK.max(), -gap_BK.min()]))
        for name, value in {
            "loss": loss,
            "tokens": counts_BK.sum(),
            "entropy": (entropy_BK * counts_BK).sum(),
            "clip_ratio/low_mean": (low_BK & counts_BK).sum(),
            "clip_ratio/high_mean": (high_BK & counts_BK).sum(),
            "sampling/logp_difference/mean": gap_BK.abs().sum(),
            "sampling/importance_sampling_ratio/mean": (gap_BK.exp() * counts_BK).sum(),
            "sampling/kl": (torch.expm1(gap_BK) - gap_BK).sum(),  # k3 estimate of KL(sampler || trainer)
        }.items():
            total[name] = total.get(name, 0.0) + value.detach().double()
    grad_norm = accelerator.clip_grad_norm_(model.parameters(), cfg.optim.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()

    sums = reduce_over_ranks(total, dist.ReduceOp.SUM)
    extremes = reduce_over_ranks({"high": gaps[0], "low": gaps[1]}, dist.ReduceOp.MAX)
    loss, tokens = sums.pop("loss"), sums.pop("tokens")
    metrics = {"loss": loss, "policy_loss": loss, "grad_norm": float(grad_norm)}
    if tokens:  # means over the tokens that were trained on; without any there is no mean
        metrics |= {name: value / tokens for name, value in sums.items()}
        metrics["clip_ratio/region_mean"] = metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]
        metrics["sampling/logp_difference/max"] = max(extremes.values())
        metrics["sampling/importance_sampling_ratio/max"] = math.exp(extremes["high"])
        metrics["sampling/importance_sampling_ratio/min"] = math.exp(-extremes["low"])
    if old_logprobs is not None or cfg.rollout.top_p < 1:  # another policy, or another distribution, on purpose
        metrics = {name: value for name, value in metrics.items() if not name.startswith("sampling/")}
    return metrics, before_update if old_logprobs is None else old_logprobs
