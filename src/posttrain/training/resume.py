"""Where a run begins: at its first step, or after the checkpoint that `resume` means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from posttrain.config import TrainingConf
from posttrain.errors import UserError
from posttrain.training import checkpoint
from posttrain.training.fingerprints import differences
from posttrain.training.fsdp import from_all_ranks
from posttrain.training.policy import Policy
from posttrain.training.reference import Reference


@dataclass(frozen=True, slots=True)
class Resumed:
    """Steps that are done, where their state came from, and what is to be said of it."""

    step: int = 0
    checkpoint: Path | None = None
    evaluation: dict[str, float] = field(default_factory=dict)  # after these steps, if there was one
    notes: tuple[str, ...] = ()

    def facts(self) -> dict[str, Any]:
        return {"resumed_from": str(self.checkpoint) if self.checkpoint else None, "resume_notes": list(self.notes)}


def resume(
    cfg: TrainingConf, run_dir: Path, policy: Policy, reference: Reference | None, fingerprints: Mapping[str, str]
) -> Resumed:
    """Load the checkpoint that `cfg.resume` means into the policy. A collective; `fingerprints` are the main rank's.

    Raises UserError where there is none, it is damaged or another model's, no step is left after it, or with
    `cfg.strict` where the run reads other data or model files by now.
    """
    found, notes = checkpoint.find(cfg.resume, run_dir)
    if found is None:
        if cfg.resume == "auto" and dist.get_rank() == 0:
            print(f"resume=auto: no checkpoint in {run_dir} yet, starting at step 0")
        return Resumed()
    manifest, more = checkpoint.load(policy.model, policy.optimizer, found, reference)
    if cfg.resume != "auto" and manifest.step >= cfg.steps:
        raise UserError(
            f"resume={cfg.resume} is a checkpoint of step {manifest.step}, and steps={cfg.steps}: raise steps"
        )
    other = from_all_ranks(differences(manifest.fingerprints, fingerprints))
    if other and cfg.strict:
        raise UserError(f"resume={cfg.resume}: {'; '.join(other)}. Type strict=false to go on with what is there now")
    return Resumed(manifest.step, found, manifest.evaluation, (*notes, *more, *other))
