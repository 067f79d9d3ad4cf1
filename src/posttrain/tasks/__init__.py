"""Tasks: prompts, answers and the rewards that score them. `TASKS` maps `task.name` to the file that reads it."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from posttrain.config.task import TaskConf
from posttrain.errors import UserError
from posttrain.tasks.arithmetic import arithmetic
from posttrain.tasks.gsm8k import gsm8k
from posttrain.tasks.jsonl import jsonl
from posttrain.tasks.prompts import problems
from posttrain.tasks.task import Data, Row, Task, batch, further

__all__ = ["TASKS", "Data", "Row", "Task", "batch", "further", "make_task"]

TASKS: dict[str, Callable[..., Data]] = {
    "arithmetic": arithmetic,
    "gsm8k": gsm8k,
    "jsonl": jsonl,
}


def make_task(cfg: TaskConf, tokenizer: PreTrainedTokenizerBase) -> Task:
    """Build the task that `cfg.name` names. Raises UserError for files that cannot be read or hold nothing."""
    data = TASKS[cfg.name.value](cfg)
    train, heldout = (problems(rows, cfg, tokenizer) for rows in (data.train, data.heldout))
    if not train:
        raise UserError(
            f"task={cfg.name} has no prompt left: {len(data.train)} rows, all empty or longer than "
            f"task.max_prompt_tokens={cfg.max_prompt_tokens} tokens"
        )
    weights = {"correct": cfg.reward_correct, "format": cfg.reward_format}
    return Task(
        train=train,
        heldout=heldout,
        rewards={name: (reward, weights[name]) for name, reward in data.rewards.items()},
        dropped=len(data.train) + len(data.heldout) - len(train) - len(heldout),
        tokenizer=tokenizer,
    )
