"""GRPO: group relative policy optimisation (DeepSeekMath, arXiv:2402.03300) and kin.

    python recipes/grpo.py model=qwen3_5_dense packing=thd
    python recipes/grpo.py algorithm=dapo
    python recipes/grpo.py -m fsdp=full_shard,shard_grad_op,no_shard launch.nproc=4

Each step samples G completions of each of P prompts and rewards them. The
advantage of a completion is its reward relative to its group. The update raises
the probability of its tokens in proportion, clipped as in PPO.

There is no critic. The paper's KL penalty and its reference model are off by
default; algorithm.kl.coefficient=1e-3 brings both back. `algorithm=` picks one of
the published variants, which differ in advantages, surrogate and normalisation
(docs/algorithms.md).

Shape suffixes: P prompts, G samples of each, B rows of a micro-batch, K tokens that
are predicted.
"""

from posttrain.command.cli import main

if __name__ == "__main__":
    # Starts the ranks. Each of them imports this file again, and calls train().
    main(__file__)

from collections import deque
from pathlib import Path

import torch
import torch.distributed as dist

from posttrain import losses
from posttrain.advantages import (
    advantages,
    informative,
    most_informative,
    overlong_penalty,
    token_weights,
)
from posttrain.config import GRPOConf
from posttrain.metrics.step import (
    UpdateMetrics,
    completion_metrics,
    reward_metrics,
)
from posttrain.records import Document, Group, MiniBatch, Packed
from posttrain.rollout.sampler import SAMPLERS, Sampler, steps_to_ask_for
from posttrain.run import Run
from posttrain.tasks import Task, batch, further, make_task
from posttrain.tasks.scoring import score
from posttrain.training import optim
from posttrain.training.fsdp import synchronise_gradients
from posttrain.training.policy import Policy, prepare
from posttrain.training.reference import make_reference


def train(cfg: GRPOConf, run_dir: Path) -> None:
    policy = prepare(cfg)
    task = make_task(cfg.task, policy.tokenizer, policy.vocabulary, cfg.reward)
    reference = make_reference(policy.model, cfg.algorithm.kl)

    with Run(cfg, run_dir, policy, task, reference) as run:
        sampler = SAMPLERS[cfg.rollout.name](policy, cfg, run.start)
        asked: deque = deque()
        for step in run.steps():
            # ---- Sample.
            # Steps may be asked for before their turn, so that engines never wait.
            with run.timed("rollout"):
                while len(asked) < steps_to_ask_for(step, cfg):
                    ahead = step + len(asked)
                    problems = batch(task.train, cfg.prompts_per_step, ahead, cfg.seed)
                    placed = dict(enumerate(problems))
                    asked.append((placed, sampler.submit(placed, ahead)))
                placed, ticket = asked.popleft()
                rollouts = sampler.collect(ticket)

            # ---- Reward.
            # Every rank scores what it sampled, and then knows all groups.
            with run.timed("reward"):
                sampled = groups = score(rollouts, placed, task)
            if cfg.algorithm.dynamic_sampling:
                sampled = replace_equal(groups, sampler, task, run, cfg)
                rewards_PG = rewards_of(sampled, cfg)
                chosen = most_informative(rewards_PG, cfg.prompts_per_step)
                groups = [sampled[place] for place in chosen]

            # ---- Compare and pack.
            # All ranks compute the same from the same groups, without a word.
            batches, everything = [], cfg.algorithm.every_token_counts
            with run.timed("update"):
                for documents in compare(groups, policy, cfg):
                    packed = policy.pack(documents, everything, run.measures_all)
                    batches.append(packed)

            # ---- Logprobs to compare with.
            # The first optimizer step compares the policy with itself, and needs none.
            if cfg.algorithm.optimizer_steps > 1:
                with run.timed("logprobs"):
                    batches = policy.with_logprobs("old_logprobs_BK", batches)
            if reference:
                with run.timed("logprobs"), reference.in_place(policy.model):
                    batches = policy.with_logprobs("reference_logprobs_BK", batches)

            # ---- Update.
            # One optimizer step a mini-batch; as many passes over all as asked for.
            complete = not any(each.left_out for each in batches)
            measured = UpdateMetrics(complete, everything)
            rate = optim.learning_rate(cfg.optim, step, cfg.steps)
            optim.set_learning_rate(policy.optimizer, rate)
            indices = [group.problem.index for group in sampled]
            for mini_batch in batches * cfg.algorithm.updates_per_rollout:
                if mini_batch.watched:
                    with run.timed("metrics"):
                        watch(mini_batch.watched, policy, measured, cfg)
                with run.timed("update"):
                    norm, token_losses = update(mini_batch, policy, measured, cfg)
                    run.count_skipped(norm, token_losses, mini_batch, indices)
            if reference and run.due(cfg.algorithm.kl.refresh_every):
                reference.refresh(policy.model, cfg.algorithm.kl.refresh_mix)

            # ---- Publish.
            # What is asked for from here on is sampled with the new weights.
            with run.timed("rollout"):
                sampler.publish(step + 1)

            # ---- Record.
            passes = (cfg.algorithm.optimizer_steps > 1) + bool(reference)
            run.bill(batches, cfg.algorithm.updates_per_rollout, passes, sampled)
            metrics = {"learning_rate": rate}
            metrics |= reward_metrics(sampled, rewards_of(sampled, cfg))
            metrics |= completion_metrics(sampled, step, cfg)
            metrics |= measured.over_ranks(sampler_known=cfg.rollout.top_p == 1)
            metrics |= policy.packing_metrics(batches)
            run.log(metrics)

            # ---- Pause.
            # What comes between two steps is in the time of neither.
            if run.due(cfg.evaluation.every):
                run.evaluate()
            if run.due(cfg.checkpoint.every):
                run.save()
        run.finish()


def rewards_of(groups: list[Group], cfg: GRPOConf) -> torch.Tensor:
    """What is compared [P, G]: weighted rewards, with DAPO's penalty on length."""
    rewards_PG = torch.tensor([group.scores["total"] for group in groups])
    lengths_PG = torch.tensor([group.trained_tokens for group in groups])
    room, overlong = cfg.rollout.max_new_tokens, cfg.algorithm.overlong
    return rewards_PG + overlong_penalty(lengths_PG, room, overlong)


def replace_equal(
    groups: list[Group], sampler: Sampler, task: Task, run: Run, cfg: GRPOConf
) -> list[Group]:
    """Dynamic sampling (DAPO): more groups, in place of those rewarded all alike."""
    for _ in range(cfg.algorithm.dynamic_sampling):
        teaching = int(informative(rewards_of(groups, cfg)).sum())
        lacking = cfg.prompts_per_step - teaching
        known = [group.problem for group in groups]
        problems = further(task.train, lacking, known, run.step, cfg.seed)
        if not problems:
            break
        placed = dict(enumerate(problems, len(groups)))
        with run.timed("rollout"):
            rollouts = sampler.collect(sampler.submit(placed, run.step))
        with run.timed("reward"):
            groups = groups + score(rollouts, placed, task)
    return groups


def compare(groups: list[Group], policy: Policy, cfg: GRPOConf) -> list[list[Document]]:
    """Each completion's advantage, and the weight of its tokens in the loss.

    By mini-batch, which is some whole groups. Its loss is the sum, over the tokens
    of all ranks, of weight * token loss: however it is split, the same.
    """
    rewards_PG = rewards_of(groups, cfg)
    counted_PG = counted_tokens(groups, rewards_PG, policy, cfg)
    advantages_PG = advantages(rewards_PG, counted_PG, cfg.algorithm)
    room = cfg.rollout.max_new_tokens
    mini_batches = []
    for n in range(cfg.algorithm.mini_batches):
        share = slice(n, None, cfg.algorithm.mini_batches)
        counted = counted_PG[share].flatten().tolist()
        scales = advantages_PG[share].flatten().tolist()
        weights = token_weights(counted, cfg.algorithm.aggregation, room)
        rollouts = [r for group in groups[share] for r in group.rollouts]
        documents = []
        for i, (r, a, w) in enumerate(zip(rollouts, scales, weights, strict=True)):
            documents.append(Document(rollout=r, advantage=a, weight=w, index=i))
        mini_batches.append(documents)
    return mini_batches


def counted_tokens(
    groups: list[Group], rewards_PG: torch.Tensor, policy: Policy, cfg: GRPOConf
) -> torch.Tensor:
    """How many tokens of each completion count in the loss [P, G]: all, or none.

    None count of a completion that has no score (NaN) or is beyond the model's
    positions, and with algorithm.mask_truncated none of one that was cut off.
    """
    counted_PG = torch.tensor([group.trained_tokens for group in groups])
    counted_PG[rewards_PG.isnan()] = 0
    for p, group in enumerate(groups):
        for g, rollout in enumerate(group.rollouts):
            cut_off = cfg.algorithm.mask_truncated and not rollout.finished
            if cut_off or len(rollout) > policy.longest:
                counted_PG[p, g] = 0
    return counted_PG


@torch.no_grad()
def watch(
    packed: Packed, policy: Policy, measured: UpdateMetrics, cfg: GRPOConf
) -> None:
    """Measure tokens that have no gradient."""
    for row in packed.rows:
        logprobs_BK, entropy_BK = policy.logprobs(row)
        terms = losses.policy_terms(logprobs_BK, entropy_BK, row, cfg.algorithm)
        measured.add(row, terms, trained=False)


def update(
    mini_batch: MiniBatch, policy: Policy, measured: UpdateMetrics, cfg: GRPOConf
) -> tuple[float | None, list[torch.Tensor]]:
    """One optimizer step on micro-batches; each rank has equally many.

    Returns the gradient's norm, None where all ranks skipped the step because it was
    not finite, and the token losses [B, K] of each of this rank's micro-batches.
    """
    total, token_losses = torch.zeros((), device=policy.device), []
    rows, bonus = mini_batch.trained.rows, cfg.algorithm.entropy_coefficient != 0
    for n, row in enumerate(rows):
        last = n + 1 == len(rows)
        with synchronise_gradients(policy.model, policy.accelerator, last):
            logprobs_BK, entropy_BK = policy.logprobs(row, entropy_gradient=bonus)
            terms = losses.policy_terms(logprobs_BK, entropy_BK, row, cfg.algorithm)
            loss = (row.weights_BK * terms.loss_BK).sum()
            # The ranks' gradients are averaged, and are to be summed.
            policy.accelerator.backward(loss * dist.get_world_size())
        measured.add(row, terms)
        total += loss.detach()
        token_losses.append(terms.loss_BK.detach())
    norm = optim.step(
        policy.accelerator, policy.model, policy.optimizer, total, cfg.optim
    )
    measured.end(norm)
    return norm, token_losses
