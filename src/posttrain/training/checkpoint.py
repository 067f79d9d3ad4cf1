"""Checkpoints: which there are, which are as they were written, and how one is read. saving.py writes them.

    checkpoints/step_00000100/
      manifest.json               the step, what the run reads, and size and SHA-256 of each file
      rank_00000.safetensors      this rank's share of weights and optimizer state, see snapshot.py
      rank_00000.json             its generator states

A checkpoint is data: no file of it is a pickle, and reading one runs no code.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from posttrain.errors import UserError
from posttrain.training import manifest
from posttrain.training.fsdp import from_all_ranks
from posttrain.training.manifest import MANIFEST, Manifest
from posttrain.training.reference import Reference
from posttrain.training.snapshot import restore, set_generator_states


def complete(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, damaged ones too, oldest first."""
    return sorted(path.parent for path in run_dir.glob(f"checkpoints/step_*/{MANIFEST}") if path.is_file())


def find(resume: str | None, run_dir: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint that `resume` means, and a line for each damaged one that is passed over. A collective.

    `resume`: null, no checkpoint; `auto`, the newest good one of this run, or none where it has none; else a run
    directory, whose newest one is meant, or a checkpoint. Raises UserError for a path that holds no checkpoint, for a
    named checkpoint that is damaged, and where all are.
    """
    if resume is None:
        return None, []
    if resume != "auto":
        path = Path(resume)
        named = (path / MANIFEST).is_file() or path.is_dir() and path.name.startswith("step_")
        found = [path] if named else _saved(path)
        if not found:
            raise UserError(
                f"resume={resume}: no checkpoint there. Give a run directory that holds checkpoints/, one of its "
                f"checkpoints/step_*, or auto{_of_old_version(path)}"
            )
        if complaint := damage(found[-1]):
            others = found[:-1] or [other for other in _saved(path.parent.parent) if other != path]
            good = next((other for other in reversed(others) if not damage(other)), None)
            advice = f"type resume={good}" if good else "there is no good one beside it"
            raise UserError(f"resume={resume}: {found[-1].name} is damaged: {complaint}; {advice}")
        return found[-1], []
    found = _saved(run_dir)
    notes: list[str] = []
    for checkpoint in reversed(found):
        complaint = damage(checkpoint)
        if complaint is None:
            return checkpoint, notes
        notes.append(f"{checkpoint.name} is damaged and passed over: {complaint}")
    if found:
        raise UserError(
            f"resume=auto: every checkpoint in {run_dir} is damaged: {'; '.join(notes)}{_of_old_version(run_dir)}"
        )
    return None, []


def _saved(run_dir: Path) -> list[Path]:
    """What has a checkpoint's name, oldest first; one that has lost its manifest is damaged, and not overlooked."""
    return sorted(path for path in run_dir.glob("checkpoints/step_*") if path.is_dir())


def _of_old_version(path: Path) -> str:
    old = [*path.glob("progress.json"), *path.glob("checkpoints/step_*/progress.json")]
    return "; the checkpoints there are of an earlier version, in pickles, which this one does not read" if old else ""


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint: a file, and what is wrong with it. None: all is as it was written. A collective.

    The ranks share the files to read.
    """
    found = manifest.read(checkpoint)
    mine: list[str | None] = []
    if isinstance(found, Manifest):
        share = list(found.files.items())[dist.get_rank() :: dist.get_world_size()]
        mine = [manifest.wrong(checkpoint, name, promised) for name, promised in share]
    elif dist.get_rank() == 0:
        mine = [found]
    return next((complaint for complaint in from_all_ranks(mine) if complaint), None)


def load(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path, reference: Reference | None = None
) -> tuple[Manifest, list[str]]:
    """Restore what `save` wrote, on any number of ranks and for any sharding; its manifest, and what is to be said.

    The checkpoint says where the reference is and the config whether it moves on: one that has moved is restored even
    if this run never moves it, and a checkpoint without one leaves `reference` what it is, the model that the run
    started from.

    Raises UserError for another model's checkpoint.
    """
    found = manifest.read(checkpoint)
    if isinstance(found, str):
        raise UserError(f"resume: {checkpoint}: {found}")
    for key, here in kind(model).items():
        if getattr(found, key) != here:
            raise UserError(
                f"resume: {checkpoint} has {key} {getattr(found, key)}, this run {here}. Resume with its model"
            )
    notes: list[str] = []
    with _one_cpu_thread():
        moved = restore(checkpoint, model, optimizer, reference)
    if moved and reference is None:
        notes.append("algorithm.kl.coefficient=0, so the reference policy of the checkpoint is not used")
    states = checkpoint / f"rank_{dist.get_rank():05d}.json"
    if states.is_file():
        set_generator_states(json.loads(states.read_text()))
    if found.world_size != dist.get_world_size():
        notes.append(
            f"the checkpoint is of {found.world_size} rank{'s' * (found.world_size != 1)}: weights, optimizer state "
            "and data order go on exactly, sums over ranks in another order"
        )
    return found, notes


def kind(model: torch.nn.Module) -> dict[str, Any]:
    """What a checkpoint and the run that loads it must have in common."""
    bare: Any = model.module if isinstance(model, DistributedDataParallel) else model
    return {
        "model": bare.config.model_type,
        "parameters": sum(parameter.numel() for parameter in bare.parameters()),
    }


@contextlib.contextmanager
def _one_cpu_thread() -> Iterator[None]:
    """Keep torch's distributed checkpoint, which works in threads of its own, from making thread teams there.

    They outlive the load and make OpenMP believe that the cores are oversubscribed: every later step on a CPU was
    3.2 times slower (torch 2.13, 2 cores, 2 threads).
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
