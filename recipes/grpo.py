"""GRPO: group relative policy optimisation (DeepSeekMath, arXiv:2402.03300) and its kin, on accelerate's FSDP2.

    python recipes/grpo.py model=qwen3_5_dense packing=thd
    python recipes/grpo.py loss=dapo
    python recipes/grpo.py -m fsdp=full_shard,shard_grad_op,hybrid_shard,no_shard launch.nproc=4

For each step: sample G completions of each of P prompts; reward each; its advantage is its reward relative to its
group; raise the probability of its tokens in proportion, clipped as in PPO. There is no critic. `loss=` picks one of
the published variants, which differ in advantages, surrogate and normalisation (docs/algorithms.md). The paper's KL
penalty is off by default: loss.kl.coefficient=1e-3 brings it and its reference model back.

Shape suffixes: P prompts, G samples of a prompt, B rows of a micro-batch, K tokens of it that are predicted.
"""

from posttrain.cli import main

if __name__ == "__main__":
    main(__file__)  # reads the config, makes the run directory and starts the ranks, which import this file again

import dataclasses
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from posttrain import checkpoint, losses, optim, packing
from posttrain.advantages import advantages, informative, overlong_penalty, token_weights
from posttrain.config import GRPOConf, MetricsName, PackingMode
from posttrain.data.tasks import batch, further, make_task
from posttrain.evaluation import evaluate
from posttrain.fsdp import from_all_ranks, gathered, make_accelerator, sharding, synchronise_gradients
from posttrain.logprobs import find_head, token_logprobs
from posttrain.metrics import UpdateMetrics, completion_metrics, performance_metrics, reward_metrics, timed
from posttrain.models import gdn_packing
from posttrain.models.loading import compute_dtype, describe, end_token_ids, load
from posttrain.reference import make_reference
from posttrain.rollout.local import generate
from posttrain.tracking import Tracker, truncate_after


def train(cfg: GRPOConf, run_dir: Path) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg.seed)
    P, G = cfg.prompts_per_step, cfg.rollout.group_size

    # Model, with the packing patch: documents of one row must not see each other, also not through the recurrent
    # state of Gated DeltaNet layers. The probe shows that they do not, or stops the run.
    model, tokenizer = load(cfg.model)
    dtype = compute_dtype(cfg.model)
    accelerator = make_accelerator(cfg.fsdp, model, dtype)
    device, packed = accelerator.device, cfg.packing.mode is PackingMode.thd
    kernels = gdn_packing.patch(model, device, packed=packed)
    proof = gdn_packing.verify(model, device, dtype) if packed and cfg.packing.verify else None
    report = dataclasses.asdict(proof or kernels)
    head = find_head(model)
    report["kernels"]["logprobs"] = head.description

    task = make_task(cfg.task, tokenizer)
    cost, longest = packing.document_cost(model), packing.longest(model)
    report["warnings"] += packing.short_of_room(task.train, cfg.rollout.max_new_tokens, longest)
    end_ids, pad_id = end_token_ids(model, tokenizer), tokenizer.pad_token_id
    model, optimizer = accelerator.prepare(model, optim.make_optimizer(model, cfg.optim))
    reference = make_reference(model, cfg.loss.kl)
    logprobs_of = partial(token_logprobs, model, temperature=cfg.rollout.temperature, head=head)
    meter = None
    if cfg.metrics.name is MetricsName.mfu:
        from posttrain.mfu import make_meter  # metrics=none does without

        meter = make_meter(cfg.metrics, model, device, dtype, world)
    resumed = checkpoint.find(cfg.resume, run_dir)
    start = checkpoint.load(accelerator, model, resumed, reference) if resumed else 0
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
        skipped = 0  # updates in a row
        for step in range(start, cfg.steps):
            seconds, began = {}, time.perf_counter()

            # Rollouts: each rank samples its share of the prompts, then every rank knows all groups of samples and
            # their rewards. Dynamic sampling draws further prompts in place of those whose samples are rewarded alike.
            problems, groups, scores = batch(task.train, P, step, cfg.seed), [], []
            for tries_left in reversed(range(1 + cfg.loss.dynamic_sampling)):
                with timed(seconds, "rollout"):
                    mine = list(enumerate(problems))[len(groups) :][rank::world]
                    with gathered(model) as bare:
                        sampled = generate(
                            bare, mine, cfg.rollout, key=(0, cfg.seed, step), end_ids=end_ids, pad_id=pad_id
                        )
                    dist.barrier()  # the phase ends when the slowest rank ends it
                with timed(seconds, "reward"):
                    scored = from_all_ranks([(rollout, task.score(rollout, tokenizer)) for rollout in sampled])
                    scored.sort(key=lambda pair: pair[0].group)  # stable: the samples of a group stay in order
                    groups += [[rollout for rollout, _ in scored[n : n + G]] for n in range(0, len(scored), G)]
                    scores += [rewards for _, rewards in scored]
                    lengths_PG = torch.tensor([[len(r.completion_ids) for r in group] for group in groups])
                    penalties_PG = overlong_penalty(lengths_PG, cfg.rollout.max_new_tokens, cfg.loss.overlong)
                    rewards_PG = torch.tensor([rewards["total"] for rewards in scores]).view(-1, G) + penalties_PG
                lacking = P - informative(rewards_PG).sum().item() if tries_left else 0
                problems += further(task.train, lacking, problems, step, cfg.seed)
                if len(problems) == len(groups):
                    break

            # The tokens that count are those of a completion that could be scored (no NaN), is not beyond the model's
            # positions and, if so asked, was not truncated. Advantages compare rewards, also of what does not count.
            chosen = torch.argsort(~informative(rewards_PG), stable=True)[:P].sort().values
            batch_groups = [groups[p] for p in chosen]
            refused_PG = torch.tensor([[len(r) > longest for r in group] for group in batch_groups])
            left_out_PG = rewards_PG[chosen].isnan() | refused_PG
            if cfg.loss.mask_truncated:
                left_out_PG |= torch.tensor([[not r.finished for r in group] for group in batch_groups])
            counted_PG = lengths_PG[chosen].masked_fill(left_out_PG, 0)
            advantages_PG = advantages(rewards_PG[chosen], counted_PG, cfg.loss)

            # Mini-batches of whole groups, packed. The loss of one is the sum over all tokens of all ranks of weight *
            # token loss. Documents without a gradient count in the weights, but are not computed.
            plans, spare = [], packing.spare(groups[0][0])
            with timed(seconds, "update"):
                for n in range(cfg.loss.mini_batches):
                    share = slice(n, None, cfg.loss.mini_batches)
                    rollouts = [rollout for group in batch_groups[share] for rollout in group]
                    lengths, scales = counted_PG[share].flatten().tolist(), advantages_PG[share].flatten().tolist()
                    weights = token_weights(lengths, cfg.loss.aggregation, cfg.rollout.max_new_tokens)
                    documents = [
                        packing.Document(rollout=r, advantage=a, weight=w, index=i)
                        for i, (r, a, w) in enumerate(zip(rollouts, scales, weights, strict=True))
                        if w and (a or cfg.loss.every_token_counts)
                    ]
                    plans.append(packing.plan(documents, spare, cfg.packing, world, cost))
                mini_batches = [[packing.build(row, cfg.packing, pad_id, device) for row in p[rank]] for p in plans]

            # Logprobs to compare with: of the policy that sampled, which only a second optimizer step needs (the first
            # one's own are these), and of the reference.
            if cfg.loss.optimizer_steps > 1:
                with timed(seconds, "logprobs"):
                    mini_batches = with_logprobs("old_logprobs_BK", mini_batches, logprobs_of)
            if reference:
                with timed(seconds, "logprobs"), reference.in_place(model):
                    mini_batches = with_logprobs("reference_logprobs_BK", mini_batches, logprobs_of)

            with timed(seconds, "update"):
                optim.set_learning_rate(optimizer, lr := optim.learning_rate(cfg.optim, step, cfg.steps))
                trained = UpdateMetrics()
                for plan, rows in list(zip(plans, mini_batches, strict=True)) * cfg.loss.updates_per_rollout:
                    grad_norm, token_losses = update(accelerator, model, optimizer, rows, logprobs_of, trained, cfg)
                    skipped = skipped + 1 if grad_norm is None else 0
                    if skipped:
                        groups_at_fault = from_all_ranks(packing.not_finite(token_losses, plan[rank], cfg.packing))
                        at_fault = [problems[group].index for group in groups_at_fault]
                        optim.say_skipped(step + 1, skipped, at_fault, cfg.optim)
                if reference and cfg.loss.kl.refresh_every and (step + 1) % cfg.loss.kl.refresh_every == 0:
                    reference.refresh(model, cfg.loss.kl.refresh_mix)

            metrics = {
                **reward_metrics(rewards_PG, scores),
                **({"rewards/overlong/mean": penalties_PG.mean().item()} if cfg.loss.overlong.buffer else {}),
                **completion_metrics([rollout for group in groups for rollout in group]),
                **trained.over_ranks(sampler_known=cfg.rollout.top_p == 1),
                **packing.statistics(plans, cfg.packing, cost, refused_PG.sum().item()),
                **({"dynamic_sampling/prompts": len(problems)} if cfg.loss.dynamic_sampling else {}),
                "learning_rate": lr,
                "num_tokens": sum(len(rollout) for group in groups for rollout in group),
            }
            if meter:
                meter.record_rollout([(len(g[0].prompt_ids), [len(r.completion_ids) for r in g]) for g in groups])
                packed = [d for plan in plans for share in plan for row in share for d in row if d.weight]
                work = [len(d) for d in packed], sum(len(d.rollout.completion_ids) for d in packed)
                for _ in range((cfg.loss.optimizer_steps > 1) + bool(reference)):
                    meter.record("logprobs", *work)
                for _ in range(cfg.loss.updates_per_rollout):
                    meter.record("update", *work, training=True)
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
                    checkpoint.save(accelerator, model, run_dir, step + 1, cfg.checkpoint.keep, reference)
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


@torch.no_grad()
def with_logprobs(field, mini_batches, logprobs_of):
    """The same micro-batches with the logprobs of the policy that the model holds at this moment in `field`."""
    return [[dataclasses.replace(row, **{field: logprobs_of(row)[0]}) for row in rows] for rows in mini_batches]


def update(accelerator, model, optimizer, rows, logprobs_of, trained: UpdateMetrics, cfg: GRPOConf):
    """One optimizer step on this rank's micro-batches, of which every rank has equally many.

    Returns the gradient's norm, None where the step was skipped (on all ranks), and the token losses [B, K] of each
    micro-batch.
    """
    total, token_losses = torch.zeros((), device=accelerator.device), []
    for n, row in enumerate(rows):
        with synchronise_gradients(model, accelerator, last=n + 1 == len(rows)):
            logprobs_BK, entropy_BK = logprobs_of(row, entropy_gradient=cfg.loss.entropy_coefficient != 0)
            terms = losses.policy_terms(logprobs_BK, entropy_BK, row, cfg.loss)
            loss = (row.weights_BK * terms.loss_BK).sum()
            accelerator.backward(loss * accelerator.num_processes)  # gradients are averaged over ranks
        trained.add(row, terms)
        total += loss.detach()
        token_losses.append(terms.loss_BK.detach())
    grad_norm = optim.step(accelerator, model, optimizer, total, cfg.optim)
    trained.end(grad_norm)
    return grad_norm, token_losses
