"""Has a scheduler asked this process to make room? Signals belong to a process, and so does the answer.

A rank that is asked goes on to a point that all ranks reach, and there they agree: `Run` writes a checkpoint, and
`Preempted` ends the job.
"""

from __future__ import annotations

import signal

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# What a process that SIGTERM ended has for an exit status.
EXIT_STATUS = 128 + signal.SIGTERM

_asked = False
_can_save = False


class Preempted(BaseException):
    """The run was asked to make room, and has a checkpoint of all that is done."""


def ask() -> None:
    global _asked
    _asked = True


def asked() -> bool:
    """What takes long looks here, and gives up: the step is repeated anyway."""
    return _asked


def can_save(value: bool) -> None:
    """From here on there is something to save: until then, and after the end, a process that is asked ends at once."""
    global _can_save
    _can_save = value


def saves() -> bool:
    return _can_save
