"""A process that computes rewards, one job at a time: `python -m posttrain.rewards.child <file descriptor>`.

Jobs come as pickles on stdin, answers go as lines of JSON to the file descriptor. What a reward prints goes to the
process's own output, which workers.py reads. Everything that a job has started is ended with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import signal
import sys
from typing import Any

from posttrain.config.reward import RewardConf
from posttrain.errors import UserError
from posttrain.rewards import kinds
from posttrain.rewards.calling import Failure, Function, call, takes_groups
from posttrain.rewards.math_judge import JUDGE

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of Linux's prctl


def main() -> None:
    _stay_with_the_parent()
    answers = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")
    jobs = sys.stdin.buffer
    # A reward that reads from the terminal gets nothing.
    sys.stdin = open(os.devnull)
    cfg: RewardConf = pickle.load(jobs)
    functions: dict[str, Function] = {}

    def say(**answer: Any) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    say(ready=True)
    while True:
        try:
            source, samples = pickle.load(jobs)
        except EOFError:
            return
        try:
            if source not in functions:
                functions[source] = kinds.make(source, cfg)
            if samples is None:
                say(group=takes_groups(functions[source]))
                continue
            values = call(functions[source], samples, any_answer=not source.startswith(kinds.PYTHON))
        except UserError as error:
            say(refused=str(error))
            continue
        # exit() in a reward ends the reward.
        except BaseException as error:
            values = [Failure("exception", f"{type(error).__name__}: {error}")] * len(samples)
        if left := _end_children():
            values = [Failure("processes", f"it left {left} running")] * len(samples)
        say(values=[{"failed": list(value)} if isinstance(value, Failure) else value for value in values])


def _stay_with_the_parent() -> None:
    """Die with the process that started this one, and be the parent of what a job's own children leave behind."""
    # Ctrl-C is for the rank, which ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Other systems than Linux have no prctl.
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)


def _end_children() -> int:
    """End every process that a job has left running, wherever in the tree it hides; how many there were."""
    import psutil

    judge = JUDGE.pid
    ended = set()
    while left := [each for each in psutil.Process().children(recursive=True) if each.pid != judge]:
        for each in left:
            with contextlib.suppress(psutil.Error):
                if each.status() != psutil.STATUS_ZOMBIE:
                    ended.add(each.pid)
                    each.kill()
        for each in left:
            with contextlib.suppress(psutil.Error, ChildProcessError):
                os.waitpid(each.pid, 0)
        if len(ended) > 10_000:
            # It forks faster than it can be ended; the time limit ends this process too.
            break
    return len(ended)


if __name__ == "__main__":
    main()
