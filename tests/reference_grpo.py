"""GRPO and its variants written out one document at a time on one process: no packing, no sharding, no micro-batches.

Each variant is its paper's formula for one completion, on plain tensors; nothing here is shared with losses.py.
"""

import copy
import statistics

import torch

from posttrain.config import Architecture, ModelConf, RolloutConf
from posttrain.config.task import ArithmeticConf, TaskName
from posttrain.models import gdn_packing
from posttrain.models.loading import end_token_ids, load
from posttrain.rollout.local import generate
from posttrain.tasks import batch, make_task

LR, PROMPTS, GROUP, MAX_NEW_TOKENS = 1e-3, 4, 4, 8  # as in conftest.SMALL and the task


def ppo(ratio, advantage, low, high):
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


# The loss of each token of one completion from its log-ratios [T], logprobs [T] and advantage.
TOKEN_LOSS = {
    "grpo": lambda d, logp, a: ppo(d.exp(), a, 0.2, 0.2),
    "dr_grpo": lambda d, logp, a: ppo(d.exp(), a, 0.2, 0.2),
    "dapo": lambda d, logp, a: ppo(d.exp(), a, 0.2, 0.28),
    "gspo": lambda d, logp, a: ppo(
        (d.mean().detach() + logp - logp.detach()).exp(), a, 3e-4, 4e-4
    ),  # eq. of GSPO-token
    "cispo": lambda d, logp, a: -d.detach().exp().clamp(max=5.0) * a * logp,
    "sapo": lambda d, logp, a: -a * torch.sigmoid((t := 1.0 if a > 0 else 1.05) * (d.exp() - 1)) * 4 / t,
    "rloo": lambda d, logp, a: ppo(d.sum().exp(), a, 0.2, 0.2).expand(len(d)),
    "reinforce_pp": lambda d, logp, a: ppo(d.exp(), a, 0.2, 0.2),
}
TOKEN_MEAN = {"dapo", "cispo", "reinforce_pp"}


def advantages_of(rewards: list[list[float]], lengths: list[list[int]], variant: str) -> list[list[float]]:
    if variant == "rloo":
        return [[r - (sum(row) - r) / (len(row) - 1) for r in row] for row in rewards]
    centred = [[r - statistics.mean(row) for r in row] for row in rewards]
    if variant == "dr_grpo":
        return centred
    if variant == "reinforce_pp":
        pairs = [pair for row in zip(centred, lengths, strict=True) for pair in zip(*row, strict=True)]
        tokens = [c for c, length in pairs for _ in range(length)]
        mean, variance = statistics.mean(tokens), statistics.variance(tokens)
        return [[(c - mean) / (variance + 1e-8) ** 0.5 for c in row] for row in centred]
    return [[c / (statistics.stdev(row) + 1e-4) for c in line] for line, row in zip(centred, rewards, strict=True)]


def logprobs_and_entropy(model, rollout, temperature=1.0):
    ids, (first, _) = torch.tensor([rollout.ids]), rollout.turns[0]
    logits = model(input_ids=ids, use_cache=False).logits[0, first - 1 : -1]
    table = (logits / temperature).log_softmax(-1)
    return table.gather(1, ids[0, first:, None])[:, 0], -(table.exp() * table).sum(-1)


def reference(
    steps=2, prompts=PROMPTS, updates=1, mini_batches=1, family="qwen3_5_dense", variant="grpo", max_norm=1.0,
    kl=0.0, entropy=0.0, refresh_every=0, temperature=1.0, max_new_tokens=MAX_NEW_TOKENS, mask_truncated=False,
):  # fmt: skip
    """A dict of metrics for each step; loss and norm are means over the step's optimizer steps.

    entropy and kl are means over all tokens that count, trained/entropy over those that have a gradient.
    """
    model, tokenizer = load(ModelConf(architecture=Architecture(family)))
    gdn_packing.patch(model)
    start = copy.deepcopy(model)
    task = make_task(ArithmeticConf(name=TaskName.arithmetic, largest=49), tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    end_ids, rows = end_token_ids(model, tokenizer), []
    for step in range(steps):
        cfg = RolloutConf(group_size=GROUP, max_new_tokens=max_new_tokens, temperature=temperature)
        problems = list(enumerate(batch(task.train, prompts, step, seed=0)))
        rollouts = generate(model, problems, cfg, key=(0, 0, step), end_ids=end_ids, pad_id=tokenizer.pad_token_id)
        groups = [rollouts[n : n + GROUP] for n in range(0, len(rollouts), GROUP)]
        rewards, lengths = [], [[len(r.written) for r in group] for group in groups]
        for (_, problem), group in zip(problems, groups, strict=True):
            rewards.append([])
            for rollout in group:
                text, ended = tokenizer.decode(rollout.written, skip_special_tokens=True), rollout.finished
                integer = text.strip().lstrip("-").isdigit()
                reward = 0.9 * (ended and text.strip() == problem.answer) + 0.1 * (ended and integer)
                if variant == "dapo":  # the last fifth of the room
                    reward -= max(0.0, len(rollout.written) - 0.8 * MAX_NEW_TOKENS) / (0.2 * MAX_NEW_TOKENS)
                rewards[-1].append(reward)
        counted = [
            [n if r.finished or not mask_truncated else 0 for n, r in zip(ns, group, strict=True)]
            for ns, group in zip(lengths, groups, strict=True)
        ]
        advantages = advantages_of(rewards, counted, variant)
        with torch.no_grad():
            old = [[logprobs_and_entropy(model, r, temperature)[0] for r in group] for group in groups]
            far = [[logprobs_and_entropy(start, r, temperature)[0] for r in group] for group in groups]
        losses, norms, entropies, of_trained, kls = [], [], [], [], []
        for n in [*range(mini_batches)] * updates:
            mine = range(n, len(groups), mini_batches)
            documents = [(g, i) for g in mine for i in range(GROUP) if counted[g][i]]
            tokens, loss = sum(lengths[g][i] for g, i in documents), 0.0
            for g, i in documents:
                rollout, advantage = groups[g][i], advantages[g][i]
                logp, h = logprobs_and_entropy(model, rollout, temperature)
                gap = far[g][i] - logp
                k3 = gap.exp() - gap - 1
                token_losses = TOKEN_LOSS[variant](logp - old[g][i], logp, advantage) + kl * k3 - entropy * h
                if variant in TOKEN_MEAN:
                    loss = loss + token_losses.sum() / tokens
                elif variant == "dr_grpo":
                    loss = loss + token_losses.sum() / (len(documents) * max_new_tokens)
                else:
                    loss = loss + token_losses.mean() / len(documents)
                entropies += h.tolist()
                kls += k3.tolist()
                if abs(advantage) > 1e-9:
                    of_trained += h.tolist()
            optimizer.zero_grad()
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
            optimizer.step()
            losses.append(loss.item())
        if refresh_every and (step + 1) % refresh_every == 0:
            start = copy.deepcopy(model)
        rows.append(
            {
                "reward": statistics.mean(r for row in rewards for r in row),
                "loss": statistics.mean(losses),
                "grad_norm": statistics.mean(norms),
                "entropy": statistics.mean(entropies),
                **({"kl": statistics.mean(kls)} if kl else {}),
                **({"trained/entropy": statistics.mean(of_trained)} if of_trained and not (kl or entropy) else {}),
                "all trained": len(of_trained) == len(entropies) or bool(kl or entropy),
            }
        )
    return rows


def assert_equals(run, rows, tolerance=1e-4, full_every=10):
    """Each record has the reference's values. `entropy` is there in full steps, and if all is trained on."""
    assert run.returncode == 0, run.output
    assert len(run.training) == len(rows)
    for step, (record, row) in enumerate(zip(run.training, rows, strict=True)):
        assert record["reward"] == record["reward"] and abs(record["reward"] - row["reward"]) < 1e-6
        complete = row["all trained"] or bool(full_every) and step % full_every == 0
        assert ("entropy" in record) == complete and ("trained/entropy" in record) == ("trained/entropy" in row), step
        for name in row.keys() - {"reward", "grad_norm", "all trained"} - (set() if complete else {"entropy"}):
            assert abs(record[name] - row[name]) <= tolerance, (name, record[name], row[name])
        assert abs(record["grad_norm"] - row["grad_norm"]) <= 1e-3 * row["grad_norm"]
