"""The chat template of a tokenizer: text of a conversation, and the tokens that end a turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

Turns = Sequence[dict[str, Any]]  # {"role": ..., "content": ...}
QUESTION, ANSWER = "How many are 4 and 7?", "They are 11 in all."  # of a conversation that is rendered to look at it


class TemplateError(ValueError):
    """Why the chat template writes no text, in one line."""


def render(tokenizer: PreTrainedTokenizerBase, turns: Turns, generation: bool = True) -> str:
    """The conversation as text, with the header of the model's turn if `generation`. Raises TemplateError."""
    try:
        text = tokenizer.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=generation)
    except Exception as error:
        # A template is a program of the checkpoint's author: it may raise whatever Python and jinja do.
        said = next(iter(str(error).strip().splitlines()), "")
        raise TemplateError(f"{type(error).__name__}: {said}" if said else type(error).__name__) from error
    # Ids come only with tokenize=True.
    assert isinstance(text, str)
    return text


def turn_end(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The token with which the chat template ends an assistant's turn; empty where it uses none, or is none."""
    if tokenizer.chat_template is None:
        return frozenset()
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    try:
        text = render(tokenizer, turns, generation=False)
    except TemplateError:
        # Templates for single questions may refuse an assistant's turn.
        return frozenset()
    _, answered, after = text.rpartition(ANSWER)
    # Some vocabularies add runs of spaces and line breaks as well, and these end nothing.
    added = {token for token, entry in tokenizer.added_tokens_decoder.items() if entry.content.strip()}
    ids = tokenizer(after, add_special_tokens=False)["input_ids"] if answered else []
    return frozenset([token for token in ids if token in added][:1])
