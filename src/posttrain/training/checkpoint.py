"""Checkpoints through accelerate: sharded weights and optimizer state, written aside and renamed when whole.

A run's data, learning rate and sampling noise are functions of the seed and the step, so weights, optimizer state,
generator states, the step's number and a reference policy that has moved are all there is to save.
Checkpoints are trusted input: torch's format has a pickled index. Load none that you would not run as a program.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as distributed_checkpoint
from accelerate import Accelerator

from posttrain.errors import UserError
from posttrain.training.reference import Reference, trained

# Written last: a directory without it is no checkpoint.
PROGRESS = "progress.json"
# Holds the trained parameters of a reference policy that has moved.
REFERENCE = "reference"


def save(
    accelerator: Accelerator,
    model: torch.nn.Module,
    run_dir: Path,
    step: int,
    keep: int,
    reference: Reference | None = None,
) -> None:
    """Write `checkpoints/step_<step>`, then drop all but the newest `keep` (0: none dropped). All ranks call it.

    The reference is written once it has moved (algorithm.kl.refresh_every); until then it is the model that the run
    started from, and adds nothing to the checkpoint.
    """
    folder = run_dir / "checkpoints"
    final = folder / f"step_{step:08d}"
    partial = folder / f"partial_{step:08d}"
    if accelerator.is_main_process:
        # A run that died while it saved leaves a partial one; one that resumed earlier writes this step again.
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(final, ignore_errors=True)
    dist.barrier()
    # Written aside and renamed when whole: whatever happens in between, no torn checkpoint has the name of a whole one.
    with _one_cpu_thread():
        accelerator.save_state(str(partial))
        if reference is not None and reference.moved:
            with reference.in_place(model):
                distributed_checkpoint.save(_weights(model), checkpoint_id=partial / REFERENCE)
    dist.barrier()
    if accelerator.is_main_process:
        (partial / PROGRESS).write_text(json.dumps({"step": step, **_kind(accelerator, model)}))
        partial.rename(final)
        for old in complete(run_dir)[:-keep] if keep else []:
            shutil.rmtree(old)
    dist.barrier()


def complete(run_dir: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    return sorted(path.parent for path in run_dir.glob(f"checkpoints/step_*/{PROGRESS}"))


def find(resume: str | None, run_dir: Path) -> Path | None:
    """The checkpoint that `resume` means: none, this run's newest (auto), another run's newest, or the one named.

    Raises UserError for a path that holds no checkpoint. `auto` without one starts at step 0.
    """
    if resume is None:
        return None
    if resume == "auto":
        if not (found := complete(run_dir)):
            print(f"resume=auto: no checkpoint in {run_dir} yet, starting at step 0")
        return found[-1] if found else None
    path = Path(resume)
    if (path / PROGRESS).is_file():
        return path
    if found := complete(path):
        return found[-1]
    raise UserError(
        f"resume={resume}: no checkpoint there. Give a run directory that holds checkpoints/, one of its "
        "checkpoints/step_*, or auto."
    )


def load(accelerator: Accelerator, model: torch.nn.Module, checkpoint: Path, reference: Reference | None = None) -> int:
    """Restore what `save` wrote, on any number of ranks; the step it was written after.

    The checkpoint says where the reference is and the config whether it moves on: one that has moved is restored even
    if this run never moves it, and a checkpoint without one leaves `reference` what it is, the model that the run
    started from.

    Raises UserError for another model's checkpoint, and between FSDP and DDP, whose files differ.
    """
    progress = json.loads((checkpoint / PROGRESS).read_text())
    for key, here in _kind(accelerator, model).items():
        if progress[key] != here:
            advice = {"ddp": "fsdp=no_shard", "fsdp": "fsdp=full_shard"}.get(progress[key], "its model")
            raise UserError(f"resume: {checkpoint} has {key} {progress[key]}, this run {here}. Resume with {advice}.")
    with _one_cpu_thread():
        accelerator.load_state(str(checkpoint))
        if (checkpoint / REFERENCE).is_dir():
            if reference is not None:
                with reference.in_place(model):
                    distributed_checkpoint.load(_weights(model), checkpoint_id=checkpoint / REFERENCE)
                reference.moved = True
            elif accelerator.is_main_process:
                print(f"resume: algorithm.kl.coefficient=0, so the reference policy in {checkpoint} is not used")
    return progress["step"]


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What torch's distributed checkpoint reads and writes in place, under names that no wrapper changes."""
    return {name: parameter.detach() for name, parameter in trained(model).items()}


def nothing_left(resume: str | None, start: int, steps: int) -> bool:
    """Is a run that resumes at `start` complete? Raises UserError where that cannot be what the user wants."""
    if start < steps or resume is None:
        return False
    if resume != "auto":
        raise UserError(f"resume={resume} is a checkpoint of step {start}, and steps={steps}: raise steps")
    print(f"nothing left to do: step {start} of steps={steps} is done")
    return True


def _kind(accelerator: Accelerator, model: torch.nn.Module) -> dict[str, str | int]:
    """What a checkpoint and the run that loads it must have in common."""
    bare = accelerator.unwrap_model(model)
    return {
        "format": "fsdp" if accelerator.is_fsdp2 else "ddp",
        "model": bare.config.model_type,
        "parameters": sum(parameter.numel() for parameter in bare.parameters()),
    }


@contextlib.contextmanager
def _one_cpu_thread() -> Iterator[None]:
    """Keep torch's distributed checkpoint, which works in threads of its own, from making thread teams there.

    They outlive the save and make OpenMP believe that the cores are oversubscribed: every later step on a CPU was
    3.2 times slower (torch 2.13, 2 cores, 2 threads).
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
