"""Small runs that something happens to from outside: a signal, a full disk, a changed file. All are users' commands."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from conftest import ROOT

# Proofs at start have tests of their own, and take half of a small run's time.
SHORT = [
    "steps=6", "prompts_per_step=4", "rollout.group_size=4", "optim.lr=1e-3", "optim.betas=[0.9,0.999]",
    "optim.schedule=linear", "optim.warmup_steps=3", "evaluation.prompts=8", "evaluation.every=3", "checkpoint.every=2",
    "packing.verify=false", "rollout.verify=false", "metrics=none",
]  # fmt: skip
KEPT = ("model.safetensors", "config.json", "tokenizer.json", "generation_config.json")


@dataclass
class Job:
    """A command at work, in a process group of its own."""

    directory: Path
    process: subprocess.Popen
    output: str = ""

    def finish(self, timeout: float = 120) -> int:
        try:
            self.output, _ = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        return self.process.returncode

    def kill(self) -> None:
        """As when the machine dies: no process of the job gets a word."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.output, _ = self.process.communicate(timeout=30)

    def ranks(self) -> list[int]:
        """The processes of the ranks."""
        found = []
        for path in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            found += [int(pid) for pid in path.read_text().split()]
        return sorted(found)

    def wait_for(self, condition: Callable[[], object], seconds: float = 60) -> None:
        """Without a pause: what is waited for may last milliseconds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.finish() or self.output
            assert time.monotonic() < deadline, "waited too long"

    def steps_on_record(self) -> int:
        path = self.directory / "metrics.jsonl"
        return max((line["step"] for line in lines(path)), default=0) if path.exists() else 0

    @property
    def summary(self) -> dict:
        return json.loads((self.directory / "summary.json").read_text())


def start(directory: Path, *overrides: str, recipe: str = "grpo", shell: str = "", **environment: str) -> Job:
    """The recipe on SHORT; `shell` is a line around it, with "$@" for the command."""
    command = [sys.executable, str(ROOT / "recipes" / f"{recipe}.py"), *SHORT, f"hydra.run.dir={directory}", *overrides]
    if shell:
        command = ["bash", "-c", shell, "bash", *command]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    return Job(directory, process)


def run(directory: Path, *overrides: str, **how) -> Job:
    job = start(directory, *overrides, **how)
    job.finish()
    return job


def lines(path: Path) -> list[dict]:
    """Whole lines only: the file may be written to."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def records(directory: Path) -> list[dict]:
    """What a run has on record, without what a clock or the memory says, nor when it saved."""
    found = []
    for line in lines(directory / "metrics.jsonl"):
        kept = {name: value for name, value in line.items() if not name.startswith(("time/", "perf/"))}
        found += [kept] if len(kept) > 1 else []
    return found


def assert_same(one: Path, other: Path) -> None:
    """Every metric of every step, and every byte of the exported model."""
    assert records(one) == records(other)
    for name in KEPT:
        assert (one / "model" / name).read_bytes() == (other / "model" / name).read_bytes(), name


def steps_saved(directory: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in directory.glob("checkpoints/step_*/manifest.json"))
