"""From the rows of a task to problems: through the chat template to token ids, and what is left out on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from posttrain.config.task import SystemRole, TableConf, TaskConf
from posttrain.errors import UserError
from posttrain.models.chat import Turns
from posttrain.records import Problem
from posttrain.tasks.task import Row
from posttrain.tasks.templates import SYSTEM, Template, encode, written

TOO_LONG = "longer than task.max_prompt_tokens"


def lacking(row: Row, cfg: TaskConf) -> str:
    """Why nothing can be asked or scored; "" where it can. Rewards of one's own may need no answer."""
    last = row.prompt[-1]["content"] if isinstance(row.prompt, tuple) and row.prompt else row.prompt
    if row.prompt is None or (row.answer is None and needs_answers(cfg)):
        return "no prompt" if row.prompt is None else "no answer"
    if not str(last or "").strip():
        return "empty prompt"
    blank = isinstance(row.answer, str) and not row.answer.strip()
    return "empty answer" if blank else ""


def needs_answers(cfg: TaskConf) -> bool:
    return not (isinstance(cfg, TableConf) and cfg.answer_column is None)


def problems(
    rows: Sequence[Row], cfg: TaskConf, tokenizer: PreTrainedTokenizerBase, template: Template
) -> tuple[list[Problem], Counter[str]]:
    """The problems of all rows that have prompt and answer and are short enough; the others, counted by reason.

    Prompts go through the tokenizer in one call. A problem's index is its row's place. Raises UserError, with the place
    of the row, where messages and template do not fit.
    """
    reasons = Counter(reason for row in rows if (reason := lacking(row, cfg)))
    asked = [(index, row) for index, row in enumerate(rows) if not lacking(row, cfg)]
    texts = [written(conversation(row, cfg, tokenizer)[0], tokenizer, row.place) for _, row in asked]
    most = most_characters(cfg, tokenizer)
    kept = [(index, row, text) for (index, row), text in zip(asked, texts, strict=True) if len(text) <= most]
    reasons.update([TOO_LONG] * (len(asked) - len(kept)))
    if not kept:
        return [], reasons
    found = []
    ids_of_all = encode([text for _, _, text in kept], tokenizer, template.appended)
    for (index, row, _), ids in zip(kept, ids_of_all, strict=True):
        # `lacking` leaves none of these.
        assert row.prompt is not None
        if 0 < len(ids) <= cfg.max_prompt_tokens:
            found.append(
                Problem(
                    task=cfg.name.value,
                    index=index,
                    prompt=row.prompt,
                    prompt_ids=ids,
                    answer=row.answer,
                    metadata=row.columns,
                )
            )
        else:
            reasons[TOO_LONG if ids else "empty prompt"] += 1
    return found, reasons


def most_characters(cfg: TaskConf, tokenizer: PreTrainedTokenizerBase) -> int:
    """A longer text has more than task.max_prompt_tokens tokens; to tokenize it could take minutes and gigabytes.

    No token stands for more characters than the longest one has, but for what a normalizer folds: four into one.
    """
    longest = max(map(len, tokenizer.get_vocab()), default=1)
    return 4 * longest * cfg.max_prompt_tokens


def conversation(row: Row, cfg: TaskConf, tokenizer: PreTrainedTokenizerBase) -> tuple[Turns, str]:
    """The turns of a prompt with its system prompt where `cfg.system_role` puts it, and that place in words.

    Raises UserError for messages without a chat template, and for two system prompts.
    """
    at = f"{row.place}: " if row.place else ""
    if isinstance(row.prompt, tuple):
        if tokenizer.chat_template is None:
            raise UserError(
                f"{at}the prompt is a list of chat messages, and the tokenizer has no chat template: set chat_template "
                "in the model's tokenizer_config.json, or write prompts as text"
            )
        turns = [dict(message) for message in row.prompt]
    else:
        turns = [{"role": "user", "content": row.prompt}]
    own = [turn for turn in turns if turn["role"] in SYSTEM]
    if own and cfg.system_prompt:
        raise UserError(f"{at}the messages have a {own[0]['role']} prompt of their own: type task.system_prompt=null")
    if cfg.system_prompt:
        own = [{"role": "system", "content": cfg.system_prompt}]
        turns = [*own, *turns]
    if not own:
        return turns, ""
    if tokenizer.chat_template is None:
        return turns, "before the prompt"
    if cfg.system_role is SystemRole.system:
        return turns, "a turn of its own"
    others = [turn for turn in turns if turn["role"] not in SYSTEM]
    first = next((turn for turn in others if turn["role"] == "user"), None)
    if first is None:
        raise UserError(f"{at}task.system_role=user: the messages have no user turn that could hold the system prompt")
    first["content"] = "\n\n".join([*(turn["content"] for turn in own), first["content"]])
    return others, "the user's turn"


def answer_ids(problem: Problem, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The answer (of several the first) as tokens that go on after the prompt, without an end token.

    Tokenizers of the SentencePiece kind put a space before the first word of a text, which a model does not write after
    a prompt. So the answer is tokenized behind the prompt's last token, behind a line break if both would become one
    token, and alone if that fails too.
    """
    answer = problem.answers[0]
    for before in (tokenizer.decode(list(problem.prompt_ids[-1:])), "\n"):
        head = tokenizer(before, add_special_tokens=False)["input_ids"]
        both = tokenizer(f"{before}{answer}", add_special_tokens=False)["input_ids"]
        if head and both[: len(head)] == head:
            return both[len(head) :]
    return tokenizer(answer, add_special_tokens=False)["input_ids"]
