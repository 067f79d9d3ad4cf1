"""Are two mathematical texts equal? math-verify says so, in a process of its own that can be ended.

math-verify 0.9.0 (2026; 3 to 17 ms a call; sets, intervals, surds, LaTeX) is what TRL scores with. Its own limit of
time is a signal, which works in a main thread only; and sympy computes 10^10^10 for as long and in as much memory as it
takes. The child has limits of both, and a pair that exceeds them is not equal.
"""

from __future__ import annotations

import json
import re
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

SECONDS, START_SECONDS = 3.0, 60.0  # of a comparison, and of the imports
BYTES = 4 * 2**30  # of the child's memory
LONGEST = 2_000  # characters of a completion's answer


class Judge:
    """One child, started with the first comparison and again after one that it did not survive."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def readable(self, answer: str) -> bool:
        """Can the text be read as mathematics?"""
        return bool(self._ask({"answer": answer}))

    def equal(self, completion: str, answer: str) -> bool:
        return bool(self._ask({"answer": answer, "completion": completion}))

    def _ask(self, question: dict[str, str]) -> Any:
        if any(len(text) > LONGEST for text in question.values()):
            return False
        with self._lock:
            child = self._started()
            assert child.stdin is not None and child.stdout is not None
            answered = False
            try:
                child.stdin.write(json.dumps(question) + "\n")
                child.stdin.flush()
                if select.select([child.stdout], [], [], SECONDS)[0] and (line := child.stdout.readline()):
                    answered = True
                    return json.loads(line)
            # It died over this question.
            except BrokenPipeError:
                pass
            finally:
                # A late answer must not be read as the next question's.
                if not answered:
                    self.close()
            return False

    def _started(self) -> subprocess.Popen[str]:
        if self._child is None or self._child.poll() is not None:
            self._child = subprocess.Popen(
                [sys.executable, "-I", str(Path(__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            assert self._child.stdout is not None
            ready = select.select([self._child.stdout], [], [], START_SECONDS)[0] and self._child.stdout.readline()
            if not ready:
                self.close()
                # The child runs this file alone, without the package around it.
                from posttrain.errors import UserError

                raise UserError(
                    "task.answer_reward=math needs math-verify, which does not start: pip install math-verify==0.9.0"
                )
        return self._child

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None


JUDGE = Judge()


def main() -> None:
    """The child: a question a line on stdin, its answer a line on stdout."""
    import resource

    from math_verify import parse, verify

    try:
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    # macOS has no such limit; the limit of time is left.
    except (ValueError, OSError):
        pass
    print("ready", flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = parse(_in_dollars(question["answer"]), parsing_timeout=None)
            found = bool(answer)
            if found and "completion" in question:
                completion = parse(_in_dollars(question["completion"]), parsing_timeout=None)
                found = bool(completion) and bool(verify(answer, completion, timeout_seconds=None))
        # Whatever a model writes may break a parser in any way.
        except Exception:
            found = False
        print(json.dumps(found), flush=True)


def _in_dollars(text: str) -> str:
    """As LaTeX, if it is no sentence and does not say where its mathematics is."""
    text = re.sub(r"√\s?\(([^()]*)\)|√\s?(\w)", lambda found: rf"\sqrt{{{found[1] or found[2]}}}", text)
    text = re.sub(r"π|(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi ", text).replace("**", "^")
    said = "$" in text or "\\boxed" in text or "\\(" in text or re.search(r"(?<!\\)\b[A-Za-z]{3,} ", text)
    return text if said else f"${text}$"


if __name__ == "__main__":
    main()
