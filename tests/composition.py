"""The command line of a recipe without its ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from conftest import ROOT

from posttrain.command import cli
from posttrain.config import JobConf

CONF = ROOT / "conf"
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir())
NEEDED = {
    "model=auto": ["model.path=somewhere"],
    "task=jsonl": ["task.path=train.jsonl"],
    "task=hub": ["task.path=openai/gsm8k"],
}


def composer(tmp_path: Path, monkeypatch, capsys) -> Callable[..., tuple[int, list[JobConf], str]]:
    """compose(*arguments) -> exit status, jobs, stderr; for a test's fixture."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # restored afterwards; the command line sets it
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def run(*arguments: str, recipe: str = "grpo", world: int = 1) -> tuple[int, list[JobConf], str]:
        monkeypatch.setattr(sys, "argv", [f"{recipe}.py", *arguments])
        jobs: list[JobConf] = []

        def take(cfg) -> int:
            jobs.append(cli._checked(recipe, cfg, world)[0])
            return 0

        status = cli._read_command_line(ROOT / "recipes" / f"{recipe}.py", take)
        return status, jobs, capsys.readouterr().err

    return run
