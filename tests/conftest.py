"""Fixtures: the project's commands as a user types them, and small models with slow-decaying states."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]

# A shell starts background jobs with these signals ignored, which commands inherit and respect: tests send them anyway.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)

# Workers of a test machine are few and busy: two threads that wait for each other are slower than one.
os.environ["OMP_NUM_THREADS"] = "1"


# Workers take whole files in this order: a long one that starts last would leave the other worker idle.
SLOWEST = (
    "training/test_checkpoint.py", "training/test_sharding.py", "recipes/test_algorithms.py", "recipes/test_grpo.py",
    "metrics/test_mfu.py", "docs/test_commands.py", "recipes/test_failures.py", "training/test_reference.py",
    "command/test_launch.py", "test_notebooks.py", "recipes/test_sft.py", "test_same.py", "docs/test_newcomer.py",
    "models/test_multimodal.py", "recipes/test_preflight.py", "models/survey/test_survey_flops.py",
    "models/survey/test_survey_packing.py", "recipes/test_reliability.py", "recipes/test_rewards.py",
    "rollout/test_held_out.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest files first, the others as they come."""

    def place(item: pytest.Item) -> int:
        file = item.path.relative_to(Path(__file__).parent).as_posix()
        return SLOWEST.index(file) if file in SLOWEST else len(SLOWEST)

    items.sort(key=place)


@dataclass
class Run:
    directory: Path
    returncode: int
    output: str

    @property
    def summary(self) -> dict:
        return json.loads((self.directory / "summary.json").read_text())

    @property
    def records(self) -> list[dict]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]

    @property
    def training(self) -> list[dict]:
        return [record for record in self.records if "loss" in record]


SMALL = [
    "steps=2",
    "prompts_per_step=4",
    "rollout.group_size=4",
    "evaluation.prompts=8",
    "checkpoint.every=0",
    "checkpoint.export=false",
    "optim.lr=1e-3",
    "optim.betas=[0.9,0.999]",
    "optim.schedule=constant",
    "optim.warmup_steps=0",
]


def command(recipe: str, *overrides: str, timeout: float = 240, **environment: str) -> subprocess.CompletedProcess:
    """Run a recipe as a user does; stdout and stderr together in `.stdout`."""
    return subprocess.run(
        [sys.executable, str(ROOT / "recipes" / f"{recipe}.py"), *overrides],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )


def typed(directory: Path, *overrides: str) -> Run:
    """recipes/grpo.py small, from the command line."""
    process = command("grpo", *SMALL, f"hydra.run.dir={directory}", *overrides)
    return Run(directory, process.returncode, process.stdout)


@pytest.fixture(scope="session")
def grpo(tmp_path_factory):
    """recipes/grpo.py small, without its command line; the same overrides run once a session."""
    from jobs import run_jobs

    done: dict[tuple[str, ...], Run] = {}

    def run(*overrides: str) -> Run:
        if overrides not in done:
            (done[overrides],) = run_jobs(tmp_path_factory.mktemp("run") / "jobs", overrides)
        return done[overrides]

    return run


class Device:
    """A device module that says its name and size, in place of torch.cuda on a machine without a GPU."""

    def __init__(self, name, processors):
        self.name, self.processors = name, processors

    def get_device_name(self, device):
        return self.name

    def get_device_properties(self, device):
        return SimpleNamespace(multi_processor_count=self.processors)


@pytest.fixture
def gpu_called(monkeypatch):
    import torch

    def call(name, processors=10_000):
        monkeypatch.setattr(torch, "get_device_module", lambda device: Device(name, processors))
        return torch.device("cuda", 0)

    return call


@pytest.fixture
def one_rank(tmp_path):
    """This process is the only rank of a run; afterwards it is as before."""
    import torch.distributed as dist
    from accelerate.state import AcceleratorState

    from posttrain.command.rank import start_process_group

    before = dict(os.environ)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    start_process_group(60, dist.FileStore(str(tmp_path / "store"), 1))
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    dist.destroy_process_group()
    os.environ.clear()
    os.environ |= before
