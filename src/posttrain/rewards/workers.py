"""Processes that compute rewards side by side, each job within a limit of time and of what it prints.

A job that hangs, dies or floods costs its own value and its process, which starts anew. The processes die with this
one, and everything that a job starts is ended with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.config.reward import RewardConf
from posttrain.errors import UserError
from posttrain.rewards.calling import Failure, Sample, Value

START_S = 120.0  # until a process answers for the first time, on a busy machine
FLOOD = 2**20  # bytes that a job may print
SHOWN = 500  # characters of them that are passed on


@dataclass(slots=True)
class Job:
    """A reward of KINDS or of a user's file, and samples of one group; None asks whether it takes whole groups."""

    source: str
    samples: Sequence[Sample] | None


@dataclass(slots=True, eq=False)
class _Child:
    process: subprocess.Popen[bytes]
    answers: int  # file descriptor
    place: int | None = None  # of the job that it works on
    deadline: float = 0.0
    line: bytes = b""
    printed: bytes = b""
    bytes_printed: int = 0

    @property
    def flooded(self) -> bool:
        return self.bytes_printed > FLOOD


@dataclass(slots=True)
class Workers:
    """At most `count` processes, started when there is something to do. Call `close` at the end."""

    cfg: RewardConf
    count: int
    _children: list[_Child] = field(default_factory=list)

    def takes_groups(self, source: str) -> bool:
        """Raises UserError for a reward that cannot be made."""
        answer = self._run([Job(source, None)], START_S)[0]
        if isinstance(answer, Failure):
            raise UserError(f"reward {source}: loading it failed, {answer}")
        return answer["group"]

    def values(self, jobs: Sequence[Job]) -> list[list[Value]]:
        """Of each job, one a sample. Raises UserError for a reward that cannot be made."""
        found = self._run(jobs, self.cfg.timeout_s)
        return [
            [answer] * len(job.samples or ()) if isinstance(answer, Failure) else _values(answer)
            for job, answer in zip(jobs, found, strict=True)
        ]

    def close(self) -> None:
        for child in list(self._children):
            self._end(child)

    def _run(self, jobs: Sequence[Job], limit_s: float) -> list[Any]:
        """What each job was answered, or why there is no answer."""
        answers: list[Any] = [None] * len(jobs)
        waiting = deque(range(len(jobs)))
        try:
            while waiting or any(child.place is not None for child in self._children):
                self._give(jobs, waiting, limit_s)
                for child in self._readable():
                    self._read(child, answers)
                self._end_the_late(answers, limit_s)
        except BaseException:
            # An answer that comes later must not be taken for another job's.
            self.close()
            raise
        for job, answer in zip(jobs, answers, strict=True):
            if isinstance(answer, dict) and "refused" in answer:
                raise UserError(answer["refused"])
            assert answer is not None, job
        return answers

    def _give(self, jobs: Sequence[Job], waiting: deque[int], limit_s: float) -> None:
        """Hand a job to each process that has none; more processes while there are more jobs."""
        while waiting:
            free = next((child for child in self._children if child.place is None), None)
            if free is None and len(self._children) < self.count:
                free = self._start()
            if free is None:
                return
            free.place = waiting.popleft()
            free.deadline = time.monotonic() + limit_s
            free.printed, free.bytes_printed = b"", 0
            job = jobs[free.place]
            assert free.process.stdin is not None
            # One that has died is noticed when its answer is read.
            with contextlib.suppress(BrokenPipeError):
                pickle.dump((job.source, job.samples), free.process.stdin)
                free.process.stdin.flush()

    def _start(self) -> _Child:
        """Raises UserError for a process that does not start."""
        reading, writing = os.pipe()
        # A session of its own: what ends the rank's group by a signal lets this one finish what the rank waits for.
        process = subprocess.Popen(
            [sys.executable, "-m", "posttrain.rewards.child", str(writing)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[writing],
            start_new_session=True,
        )
        os.close(writing)
        child = _Child(process, reading)
        self._children.append(child)
        assert process.stdin is not None and process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        os.set_blocking(reading, False)
        child.place, child.deadline = -1, time.monotonic() + START_S
        answers: list[Any] = [None]
        with contextlib.suppress(BrokenPipeError):
            pickle.dump(self.cfg, process.stdin)
            process.stdin.flush()
        while child.place is not None:
            for each in self._readable([child]):
                self._read(each, answers)
            if child.place is not None:
                self._end_the_late(answers, START_S, [child])
        if not isinstance(answers[-1], dict):
            raise UserError(f"a process for rewards does not start: {answers[-1]}; {_text(child.printed)}")
        return child

    def _readable(self, children: Sequence[_Child] | None = None) -> list[_Child]:
        """Those at work that have said something, after at most a tenth of a second."""
        working = [child for child in (self._children if children is None else children) if child.place is not None]
        with selectors.DefaultSelector() as selector:
            for child in working:
                assert child.process.stdout is not None
                selector.register(child.answers, selectors.EVENT_READ, child)
                if not child.process.stdout.closed:
                    selector.register(child.process.stdout, selectors.EVENT_READ, child)
            ready = selector.select(0.1)
        return list(dict.fromkeys(key.data for key, _ in ready))

    def _read(self, child: _Child, answers: list[Any]) -> None:
        """What it printed, and its answer if that is whole. One whose pipe is closed has died."""
        place = child.place
        assert place is not None
        self._read_output(child)
        piece = _available(child.answers)
        if piece == b"":
            status = child.process.wait()
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            answers[place] = Failure("died", f"its process ended with {how}")
            self._end(child)
            return
        child.line += piece or b""
        if child.flooded:
            answers[place] = Failure("flood", f"it printed more than {FLOOD:,} bytes")
            self._end(child)
        elif child.line.endswith(b"\n"):
            # Everything was printed before the answer was sent.
            self._read_output(child)
            answers[place] = json.loads(child.line)
            child.line, child.place = b"", None
            self._pass_on(child)

    def _read_output(self, child: _Child) -> None:
        stdout = child.process.stdout
        assert stdout is not None
        while not stdout.closed and (piece := _available(stdout.fileno())) is not None:
            if piece == b"":
                # The job has closed its output.
                stdout.close()
                return
            child.printed = (child.printed + piece)[:SHOWN]
            child.bytes_printed += len(piece)
            if child.flooded:
                return

    def _end_the_late(self, answers: list[Any], limit_s: float, children: Sequence[_Child] | None = None) -> None:
        now = time.monotonic()
        for child in list(self._children if children is None else children):
            if child.place is not None and now > child.deadline:
                answers[child.place] = Failure("timeout", f"it took longer than {limit_s:g} s")
                self._end(child)

    def _pass_on(self, child: _Child) -> None:
        """A user who prints in a reward wants to see it."""
        if child.printed:
            print(_text(child.printed), file=sys.stderr, flush=True)

    def _end(self, child: _Child) -> None:
        """The process and all that it has started."""
        import psutil

        self._pass_on(child)
        child.place = None
        if child in self._children:
            self._children.remove(child)
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(child.process.pid)
            # Nobody in it starts another one while they are looked for.
            process.suspend()
            for each in process.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    each.kill()
        child.process.kill()
        child.process.wait()
        os.close(child.answers)
        for stream in (child.process.stdin, child.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _available(file: int) -> bytes | None:
    """What can be read now: b"" at the end of the file, None where nothing has come yet."""
    try:
        return os.read(file, 2**16)
    except BlockingIOError:
        return None


def _values(answer: dict[str, Any]) -> list[Value]:
    """As calling.py made them: JSON knows no tuple."""
    return [
        Failure(*value["failed"]) if isinstance(value, dict) and isinstance(value.get("failed"), list) else value
        for value in answer["values"]
    ]


def _text(printed: bytes) -> str:
    return printed.decode("utf-8", errors="replace").rstrip()
