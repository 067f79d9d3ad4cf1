"""The console is best effort: a closed pipe (`| head -1`) or a full disk behind it ends no training.

The files of the run are the record; what cannot be printed is left out.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, TextIO


class BestEffort:
    """A text stream that goes silent where the stream behind it cannot take any more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._going_silent():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._going_silent():
            self._stream.flush()

    @contextlib.contextmanager
    def _going_silent(self) -> Any:
        try:
            yield
        # ValueError: the stream is closed.
        except (OSError, ValueError):
            # What is still in the buffer would fail again at every write, and at the end of the process.
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)


def make_best_effort() -> None:
    """Of this process's stdout and stderr."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, BestEffort):
            setattr(sys, name, BestEffort(stream))
