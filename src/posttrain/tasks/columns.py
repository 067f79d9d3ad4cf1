"""From the columns of a record to a row: the prompt, as text or messages, and the answer, as text or several texts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any

from posttrain.config.task import TableConf
from posttrain.errors import UserError
from posttrain.records import Messages
from posttrain.tasks.formats import Record
from posttrain.tasks.task import Row


class Unusable(ValueError):
    """Why a value is neither a prompt nor an answer."""


def rows(records: Iterable[Record], source: str, cfg: TableConf, names: Sequence[str] = ()) -> list[Row]:
    """Prompt and answer of each record; None where there is none.

    Args:
        source: what the records were read from, such as "task.path=a.jsonl".
        names: all columns, where the records hold only some of them.

    Raises:
        UserError: a record lacks a column, or holds what is neither a prompt nor an answer, with its place.
    """
    found = []
    for place, columns in records:
        where = f"{source} {place}"
        values = {}
        for option, column in _wanted(cfg):
            try:
                values[column] = lookup(columns, column)
            except LookupError as error:
                # Names may hold line breaks.
                has = ", ".join(name if name.isprintable() else repr(name) for name in names or columns)
                raise UserError(f"{where} has no column {column!r}; it has {has}. Set task.{option}.") from error
        column = cfg.prompt_column
        try:
            asked = prompt(values[column])
            right = None
            if cfg.answer_column is not None:
                column = cfg.answer_column
                right = answer(values[column])
        except Unusable as error:
            raise UserError(f"{where}, column {column}: {error}") from error
        others = columns if cfg.columns is None else {name: values[name] for name in cfg.columns}
        told = {name: value for name, value in others.items() if name not in (cfg.prompt_column, cfg.answer_column)}
        found.append(Row(asked, right, where, told))
    return found


def _wanted(cfg: TableConf) -> list[tuple[str, str]]:
    """Each column that a row must have, and the option that names it."""
    answers = [("answer_column", cfg.answer_column)] if cfg.answer_column is not None else []
    return [("prompt_column", cfg.prompt_column), *answers, *(("columns", name) for name in cfg.columns or ())]


def outer(cfg: TableConf, names: Sequence[str]) -> set[str]:
    """Those of the columns `names` that hold what the options ask for, by their own name or as a.b's a."""
    wanted = [column for _, column in _wanted(cfg)]
    return {*wanted, *(column.partition(".")[0] for column in wanted)} & set(names)


def lookup(columns: dict[str, Any], name: str) -> Any:
    """The column of this name, or for a.b the field b of column a; None below null. Raises LookupError."""
    if name in columns:
        return columns[name]
    outer, dot, inner = name.partition(".")
    below = columns[outer]
    if dot and below is None:
        return None
    if not dot or not isinstance(below, dict):
        raise LookupError(name)
    return lookup(below, inner)


def prompt(value: Any) -> str | Messages | None:
    """Text, a number as text, or chat messages; None for null. Raises Unusable for anything else."""
    if is_null(value):
        return None
    if isinstance(value, str):
        return _messages_in(value) or text(value)
    if isinstance(value, list):
        return messages(value)
    if (plain := number(value)) is not None:
        return plain
    raise Unusable(f"a prompt is text or a list of chat messages, and this is {_called(value)}")


def answer(value: Any) -> str | tuple[str, ...] | None:
    """Text, a number as text, or several in a list; None for null, and for a list of nulls. Raises Unusable.

    A truth value is written true or True: both are right.
    """
    if is_null(value):
        return None
    if isinstance(value, bool):
        return (str(value).lower(), str(value))
    if isinstance(value, str):
        return text(value)
    if isinstance(value, list):
        if any(isinstance(one, list) for one in value):
            raise Unusable("a list of answers holds text or numbers, and this one holds a list")
        each = [answer(one) for one in value]
        flat = [one for found in each if found is not None for one in ([found] if isinstance(found, str) else found)]
        different = tuple(dict.fromkeys(flat))
        return different[0] if len(different) == 1 else different or None
    if (plain := number(value)) is not None:
        return plain
    raise Unusable(f"an answer is text, a number or a list of them, and this is {_called(value)}")


def messages(value: list[Any]) -> Messages:
    """Chat messages, content as one text each; fields that are null are left out. Raises Unusable."""
    if not all(isinstance(each, dict) for each in value):
        raise Unusable("a list as a prompt holds chat messages, {role: ..., content: ...}, and this one holds others")
    found = []
    for count, message in enumerate(value, 1):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            raise Unusable(f"message {count} has no role")
        fields = {name: field for name, field in message.items() if field is not None}
        found.append(fields | {"role": text(role), "content": _content(content, f"message {count}")})
    if found and found[-1]["role"] in ("assistant", "model"):
        raise Unusable(
            "the conversation ends with an assistant's turn, and the model is to write that one: put it into the "
            "column of task.answer_column and leave it out of the messages"
        )
    return tuple(found)


def _content(content: Any, where: str) -> str:
    """Parts of text are joined."""
    if isinstance(content, str):
        return text(content)
    if not isinstance(content, list):
        raise Unusable(f"{where} has {_called(content)} as its content, which must be text")
    parts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = f"a part of type {part.get('type')!r}" if isinstance(part, dict) else f"{_called(part)} as a part"
            raise Unusable(f"{where} has {kind}: only parts {{type: text, text: ...}} can be read")
        parts.append(text(part["text"]))
    return "".join(parts)


def _messages_in(value: str) -> Messages | None:
    """Messages that were written as text, as CSV files must: JSON is read. Raises Unusable for Python's repr."""
    start = "".join(value[:40].split())
    if start.startswith(("[{'role':", "[{'content':")):
        raise Unusable("these are messages as Python prints them: write them as JSON")
    if not start.startswith(('[{"role":', '[{"content":')):
        return None
    try:
        read = json.loads(value)
    except ValueError:
        # It only begins like messages.
        return None
    return messages(read)


def text(value: str) -> str:
    """The same text. Raises Unusable for half a surrogate pair, which no tokenizer takes."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Unusable(f"character {error.start + 1} is \\u{ord(value[error.start]):04x}, half a character") from error
    return value


def number(value: Any) -> str | None:
    """A number as a person writes it: 72, not 72.0; None for anything else. Raises Unusable for infinities."""
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return None
    if not math.isfinite(value):
        raise Unusable("the number is infinite")
    # The decimals that stand for a float are its shortest ones.
    digits = format(Decimal(repr(value)) if isinstance(value, float) else Decimal(value), "f")
    digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return "0" if digits == "-0" else digits


def is_null(value: Any) -> bool:
    return value is None or (isinstance(value, float | Decimal) and math.isnan(value))


def _called(value: Any) -> str:
    names = {dict: "an object with fields", bytes: "bytes", bool: "a truth value", type(None): "null", list: "a list"}
    return names.get(type(value), f"a value of type {type(value).__name__}")
