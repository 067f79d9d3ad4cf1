"""Tasks: prompts, answers and the rewards that score them. `TASKS` maps `task.name` to the file that reads it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from posttrain.config.reward import RewardConf
from posttrain.config.task import TaskConf
from posttrain.errors import UserError
from posttrain.rewards.scorer import Scorer, choose
from posttrain.rewards.workers import Workers
from posttrain.tasks.arithmetic import arithmetic
from posttrain.tasks.gsm8k import gsm8k
from posttrain.tasks.hub import hub
from posttrain.tasks.jsonl import jsonl
from posttrain.tasks.prompts import TOO_LONG, answer_ids, conversation, lacking, problems
from posttrain.tasks.task import Data, Row, Task, batch, further
from posttrain.tasks.templates import Template, check_vocabulary, inspect

__all__ = ["TASKS", "Data", "Row", "Task", "Template", "answer_ids", "batch", "further", "make_task"]

TASKS: dict[str, Callable[..., Data]] = {
    "arithmetic": arithmetic,
    "gsm8k": gsm8k,
    "jsonl": jsonl,
    "hub": hub,
}


def make_task(
    cfg: TaskConf,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: int | None = None,
    reward: RewardConf | None = None,
) -> Task:
    """Build the task that `cfg.name` names. A reward of its data weighs 1 if it is neither "correct" nor "format".

    Args:
        vocabulary: tokens that the model has embeddings of; None where there is no model.
        reward: which rewards score it; None: the task's own.

    Raises:
        UserError: data that cannot be read or holds nothing to train on, a chat template that does not fit it, or a
            reward that cannot be made.
    """
    reward = reward or RewardConf()
    data = TASKS[cfg.name.value](cfg)
    usable = next((row for row in data.train if not lacking(row, cfg)), None)
    if usable is None:
        raise UserError(_nothing_left(cfg, len(data.train), Counter(lacking(row, cfg) for row in data.train)))
    template = inspect(*conversation(usable, cfg, tokenizer), tokenizer, usable.place)
    train, reasons = problems(data.train, cfg, tokenizer, template)
    if not train:
        raise UserError(_nothing_left(cfg, len(data.train), reasons))
    heldout, others = problems(data.heldout, cfg, tokenizer, template)
    if vocabulary is not None:
        check_vocabulary([*train, *heldout], tokenizer, vocabulary)
    weights = {"correct": cfg.reward_correct, "format": cfg.reward_format}
    chosen = choose(data.rewards, weights, reward)
    return Task(
        train=train,
        heldout=heldout,
        rewards={cfg.name.value: Scorer(chosen, reward, Workers(reward, _workers(reward)))},
        dropped=dict(reasons + others),
        template=template,
        tokenizer=tokenizer,
    )


def _workers(reward: RewardConf) -> int:
    """Processes on this rank."""
    if isinstance(reward.workers, int):
        return reward.workers
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def _nothing_left(cfg: TaskConf, rows: int, reasons: Counter[str]) -> str:
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    limit = f"={cfg.max_prompt_tokens}" if TOO_LONG in reasons else ""
    return f"task={cfg.name} has no prompt left of {rows} rows: {counts}".replace(TOO_LONG, f"{TOO_LONG}{limit}")
