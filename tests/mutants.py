"""Do the tests notice? Plants faults in a copy of the project, one at a time, and runs the tests that should see them.

    make mutants                                # all faults, about an hour on two cores
    make mutants ARGS="optim checkpoint"        # those of files whose path holds one of these words
    make mutants ARGS="--lived"                 # those that lived in the last run

tests/faults/*.toml list the faults: a file, what stands there once, what is planted in its place, and the tests to run.
A fault that cannot be noticed says why in `lives`. Exit status 1 where fewer than 95 % of the others are noticed, or a
fault that should live does not; 2 where a fault no longer fits the code, or tests fail without any.

Faults are chosen by hand. mutmut and cosmic-ray make them by rule: thousands, for code of this size, each against a
suite that starts processes, and a good part of them equivalent to the code that they replace.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
FAULTS = Path(__file__).with_name("faults")
LIVED = ROOT / "outputs" / "mutants.txt"
COPIED = ("src", "recipes", "conf", "tests", "docs", "notebooks", "README.md", "CONTRIBUTING.md", "pyproject.toml")
WORKERS, TIMEOUT_S, ENOUGH = 2, 300, 0.95


@dataclass(frozen=True)
class Fault:
    file: str
    old: str
    new: str
    tests: str  # arguments of pytest
    lives: str = ""  # why no test can notice it

    def __str__(self) -> str:
        return f"{self.file}: {self.old.strip()!r} -> {self.new.strip()!r}"


def faults() -> list[Fault]:
    """All that tests/faults/ lists."""
    found = []
    for path in sorted(FAULTS.glob("*.toml")):
        found += [Fault(**entry) for entry in tomllib.loads(path.read_text())["fault"]]
    return found


def misfits() -> list[str]:
    """What is wrong with the lists: a fault must fit the code in one place, and each file must have one."""
    wrong = []
    for fault in faults():
        path = ROOT / fault.file
        times = path.read_text().count(fault.old) if path.is_file() else 0
        if times != 1:
            wrong.append(f"{fault}: stands there {times} times, must be once")
        if fault.old == fault.new:
            wrong.append(f"{fault}: changes nothing")
        for argument in shlex.split(fault.tests):
            if argument.startswith("tests/") and not (ROOT / argument.partition("::")[0]).exists():
                wrong.append(f"{fault}: there is no {argument}")
    have = {fault.file for fault in faults()}
    return wrong + [f"{file}: has no fault" for file in code_files() if file not in have]


def code_files() -> Iterator[str]:
    """Files of src and recipes that hold a function."""
    for folder in ("src", "recipes"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "def " in path.read_text():
                yield str(path.relative_to(ROOT))


def run_tests(copy: Path, tests: str) -> tuple[int | None, str]:
    """pytest's exit status and output in a copy of the project; None says that it hung."""
    environment = os.environ | {"PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", "0", *shlex.split(tests)]
    pytest = subprocess.Popen(
        command, cwd=copy, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = pytest.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None, f"hung for {TIMEOUT_S} s"
    finally:
        # Ranks that a hanging test started are of its session.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pytest.pid, signal.SIGKILL)
        pytest.wait()
    return pytest.returncode, output


def plant(copy: Path, fault: Fault) -> tuple[int | None, str]:
    path = copy / fault.file
    before = path.read_text()
    path.write_text(before.replace(fault.old, fault.new))
    try:
        return run_tests(copy, fault.tests)
    finally:
        path.write_text(before)


def copies(folder: str) -> SimpleQueue[Path]:
    free: SimpleQueue[Path] = SimpleQueue()
    for number in range(WORKERS):
        copy = Path(folder, str(number))
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                copy.mkdir(exist_ok=True)
                shutil.copy(ROOT / name, copy / name)
        free.put(copy)
    return free


def chosen(words: list[str], lived: bool) -> list[Fault]:
    known = LIVED.read_text().splitlines() if lived and LIVED.exists() else []
    return [
        fault
        for fault in faults()
        if (not words or any(word in fault.file for word in words)) and (not lived or str(fault) in known)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--lived", action="store_true")
    args = parser.parse_args()
    if wrong := misfits():
        print("\n".join(wrong), file=sys.stderr)
        return 2
    todo = chosen(args.words, args.lived)
    if not todo:
        print("no fault is chosen by these words", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(WORKERS) as pool:
        free = copies(folder)

        def in_a_copy(function, *arguments):
            copy = free.get()
            try:
                return function(copy, *arguments)
            finally:
                free.put(copy)

        suites = sorted({fault.tests for fault in todo})
        for suite, (status, output) in zip(suites, pool.map(lambda s: in_a_copy(run_tests, s), suites), strict=True):
            print(f"without a fault: {suite}: {'passed' if status == 0 else output[-2000:]}", flush=True)
            if status != 0:
                return 2
        results = pool.map(lambda fault: in_a_copy(plant, fault), todo)
        lived = []
        for number, (fault, (status, _)) in enumerate(zip(todo, results, strict=True), 1):
            # A hang names nothing: no test has noticed.
            verdict = {0: "lived", None: "hung"}.get(status, "noticed")
            expected = f" (as expected: {fault.lives})" if fault.lives and not status else ""
            print(f"{number}/{len(todo)} {verdict}{expected}  {fault}", flush=True)
            if not status:
                lived.append(fault)
    return report(todo, lived)


def report(todo: list[Fault], lived: list[Fault]) -> int:
    """Print what came of it, keep what lived for the next run; the exit status."""
    LIVED.parent.mkdir(exist_ok=True)
    LIVED.write_text("".join(f"{fault}\n" for fault in lived))
    meant = [fault for fault in todo if not fault.lives]
    unseen = [fault for fault in lived if not fault.lives]
    surprising = [fault for fault in todo if fault.lives and fault not in lived]
    share = 1 - len(unseen) / max(1, len(meant))
    for title, group in (("lived", unseen), ("noticed, though its entry says it lives", surprising)):
        for fault in group:
            print(f"{title}: {fault}")
    seen, by_design = len(meant) - len(unseen), len(todo) - len(meant)
    print(f"{seen} of {len(meant)} faults noticed ({share:.1%}); {by_design} live by design")
    return int(share < ENOUGH or bool(surprising))


if __name__ == "__main__":
    sys.exit(main())
