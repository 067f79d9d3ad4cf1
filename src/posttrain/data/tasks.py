"""Tasks: prompts, answers and the rewards that score them. `TASKS` maps `task.name` to its builder."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from posttrain.config import AnswerReward, ArithmeticConf, FileConf, TaskConf
from posttrain.data import rewards
from posttrain.errors import UserError
from posttrain.records import Problem, Rollout


@dataclass(frozen=True, slots=True)
class Task:
    train: Sequence[Problem]
    heldout: Sequence[Problem]
    rewards: dict[str, tuple[rewards.Reward, float]]  # name -> (function, weight)
    dropped: int  # prompts left out: empty, or longer than task.max_prompt_tokens

    def score(self, rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
        """Each reward of one completion, unweighted, and "total", their weighted sum. NaN: could not be scored."""
        text = tokenizer.decode(rollout.completion_ids, skip_special_tokens=True)
        scores, total = {}, 0.0
        for name, (reward, weight) in self.rewards.items():
            value = reward(text, rollout.answer, rollout.finished)
            scores[name] = math.nan if value is None else value
            total += weight * scores[name] if weight else 0.0
        return {**scores, "total": total}


def batch(problems: Sequence[Problem], count: int, step: int, seed: int) -> list[Problem]:
    """The `count` problems of step `step` (from 0): each epoch is a fresh permutation, shown once, none skipped.

    A function of its arguments alone, so a resumed run needs no data state.
    """
    picked, orders = [], {}
    for position in range(step * count, (step + 1) * count):
        epoch, offset = divmod(position, len(problems))
        if epoch not in orders:
            orders[epoch] = random.Random(f"{seed}/{epoch}").sample(range(len(problems)), len(problems))
        picked.append(problems[orders[epoch][offset]])
    return picked


def further(problems: Sequence[Problem], count: int, seen: Sequence[Problem], step: int, seed: int) -> list[Problem]:
    """Up to `count` problems at random, none of `seen`: draws beside those of `batch`, whose epochs stay as they are.

    A function of its arguments alone, as `batch` is.
    """
    known = {problem.index for problem in seen}
    left = [problem for problem in problems if problem.index not in known]
    return random.Random(f"{seed}/{step}/{len(seen)}").sample(left, max(0, min(count, len(left))))


def make_task(cfg: TaskConf, tokenizer: PreTrainedTokenizerBase) -> Task:
    """Build the task that `cfg.name` names. Raises UserError for files that cannot be read or hold nothing."""
    train_rows, heldout_rows, scorers = TASKS[cfg.name.value](cfg)
    splits = [_tokenize(rows, cfg, tokenizer) for rows in (train_rows, heldout_rows)]
    if not splits[0]:
        raise UserError(
            f"task={cfg.name} has no prompt left: {len(train_rows)} rows, all empty or longer than "
            f"task.max_prompt_tokens={cfg.max_prompt_tokens} tokens"
        )
    weights = {"correct": cfg.reward_correct, "format": cfg.reward_format}
    dropped = len(train_rows) + len(heldout_rows) - sum(map(len, splits))
    return Task(splits[0], splits[1], {name: (scorers[name], weights[name]) for name in scorers}, dropped)


Rows = list[tuple[str, str]]  # (prompt, answer)
Scorers = dict[str, rewards.Reward]


def arithmetic(cfg: ArithmeticConf) -> tuple[Rows, Rows, Scorers]:
    """`a+b=` for every pair of operands up to `largest`; the held-out pairs are never trained on."""
    pairs = [(f"{a}+{b}=", str(a + b)) for a in range(cfg.largest + 1) for b in range(cfg.largest + 1)]
    random.Random(cfg.seed).shuffle(pairs)
    if cfg.heldout >= len(pairs):
        raise UserError(f"task.heldout={cfg.heldout} leaves no training problem of {len(pairs)}; lower it")
    scorers = {"correct": rewards.exact, "format": rewards.integer_format}
    return pairs[cfg.heldout :], pairs[: cfg.heldout], scorers


def gsm8k(cfg: FileConf) -> tuple[Rows, Rows, Scorers]:
    """openai/gsm8k from the hub through `datasets`, or a local file of the same columns."""
    scorers = {"correct": _answer_reward(cfg), "format": rewards.marked_format}
    if Path(cfg.path).suffix in _READERS:
        return (*_split(cfg), scorers)
    if cfg.eval_path is not None:
        raise UserError(
            f"task.eval_path={cfg.eval_path}: {cfg.path} on the hub brings its own test split; leave it out"
        )
    import datasets  # half a second, and only here

    try:
        loaded = datasets.load_dataset(cfg.path, "main")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"task.path={cfg.path} could not be loaded from the hub ({str(error).splitlines()[0]}). "
            "A local .jsonl, .csv or .parquet file with the same columns also works."
        ) from error
    return _rows(loaded["train"].to_list(), cfg), _rows(loaded["test"].to_list(), cfg), scorers


def jsonl(cfg: FileConf) -> tuple[Rows, Rows, Scorers]:
    """A local JSONL, CSV or parquet file; `prompt_column` and `answer_column` name its columns."""
    return (*_split(cfg), {"correct": _answer_reward(cfg), "format": rewards.finished_format})


TASKS: dict[str, Callable[..., tuple[Rows, Rows, Scorers]]] = {
    "arithmetic": arithmetic,
    "gsm8k": gsm8k,
    "jsonl": jsonl,
}


def _answer_reward(cfg: FileConf) -> rewards.Reward:
    return {AnswerReward.exact: rewards.exact, AnswerReward.numeric: rewards.numeric}[cfg.answer_reward]


def _split(cfg: FileConf) -> tuple[Rows, Rows]:
    rows = _rows(_read(cfg.path, "task.path"), cfg)
    if cfg.eval_path is not None:
        return rows, _rows(_read(cfg.eval_path, "task.eval_path"), cfg)
    heldout = min(cfg.heldout, len(rows) // 2)  # a file of a few rows still trains on half of them
    return rows[: len(rows) - heldout], rows[len(rows) - heldout :]


def _rows(records: list[dict], cfg: FileConf) -> Rows:
    for number, record in enumerate(records, 1):
        for option in ("prompt_column", "answer_column"):
            if getattr(cfg, option) not in record:
                raise UserError(
                    f"task.path={cfg.path} row {number} has no column {getattr(cfg, option)!r}; it has "
                    f"{', '.join(map(str, record))}. Set task.{option}."
                )
    return [(str(r[cfg.prompt_column] or ""), str(r[cfg.answer_column])) for r in records]


def _read_json_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def _read_csv(file: Path) -> list[dict]:
    with file.open(newline="", encoding="utf-8") as stream:  # as text: 007 stays 007
        return list(csv.DictReader(stream))


def _read_parquet(file: Path) -> list[dict]:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(file).to_pylist()


_READERS = {".jsonl": _read_json_lines, ".json": _read_json_lines, ".csv": _read_csv, ".parquet": _read_parquet}


def _read(path: str, option: str) -> list[dict]:
    reader = _READERS.get(Path(path).suffix)
    if reader is None:
        raise UserError(f"{option}={path}: the name must end in {', '.join(_READERS)}")
    try:
        records = reader(Path(path))
    except (OSError, ValueError) as error:  # a missing or torn file, broken JSON, CSV or parquet
        raise UserError(f"{option}={path} cannot be read: {str(error).splitlines()[0]}") from error
    if not all(isinstance(record, dict) for record in records):
        raise UserError(f"{option}={path}: each line must be a JSON object with the columns of one row")
    return records


def _tokenize(rows: Rows, cfg: TaskConf, tokenizer: PreTrainedTokenizerBase) -> list[Problem]:
    """Prompts through the chat template (which holds the only BOS), in one call; overlong ones are left out."""
    if not rows:
        return []
    texts = [_render(prompt, cfg.system_prompt, tokenizer) for prompt, _ in rows]
    encoded = tokenizer(texts, add_special_tokens=tokenizer.chat_template is None)["input_ids"]
    return [
        Problem(index, tuple(ids), answer)
        for index, ((prompt, answer), ids) in enumerate(zip(rows, encoded, strict=True))
        if prompt.strip() and 0 < len(ids) <= cfg.max_prompt_tokens
    ]


def _render(prompt: str, system: str | None, tokenizer: PreTrainedTokenizerBase) -> str:
    if tokenizer.chat_template is None:
        return prompt if system is None else f"{system}\n\n{prompt}"
    turns = [{"role": "system", "content": system}] if system else []
    return tokenizer.apply_chat_template(
        [*turns, {"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
