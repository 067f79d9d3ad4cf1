"""The chat template of a tokenizer: text of a conversation, and the tokens that end a turn."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from transformers import PreTrainedTokenizerBase

Turns = Sequence[dict[str, Any]]  # {"role": ..., "content": ...}
# A template is a program: it may loop for ever.
LIMIT_S = 10.0
QUESTION, ANSWER = "How many are 4 and 7?", "They are 11 in all."  # of a conversation that is rendered to look at it


class TemplateError(ValueError):
    """Why the chat template writes no text, in one line."""


def render(tokenizer: PreTrainedTokenizerBase, turns: Turns, generation: bool = True) -> str:
    """The conversation as text, with the header of the model's turn if `generation`.

    Raises TemplateError, also after LIMIT_S seconds.
    """
    try:
        with _within(LIMIT_S):
            text = tokenizer.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=generation)
    except Exception as error:
        # A template is a program of the checkpoint's author: it may raise whatever Python and jinja do.
        said = next(iter(str(error).strip().splitlines()), "")
        raise TemplateError(f"{type(error).__name__}: {said}" if said else type(error).__name__) from error
    # Ids come only with tokenize=True.
    assert isinstance(text, str)
    return text


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in what is inside; in another thread than the main one, which gets no signals, never."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it took longer than {seconds:g} s")

    before, began = signal.signal(signal.SIGALRM, late), time.monotonic()
    others, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        # Somebody else's alarm goes on.
        signal.setitimer(signal.ITIMER_REAL, max(others - (time.monotonic() - began), 0.001) if others else 0)
        signal.signal(signal.SIGALRM, before)


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
