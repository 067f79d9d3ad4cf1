"""Writes checkpoints beside the training: a copy of the state is taken, and a thread brings it to the disk.

Each rank writes and signs its own share, and the main rank closes the checkpoint when all are there: the manifest, the
directory's name, and what is dropped for it. The threads hold no collective; the ranks meet in the directory.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from posttrain.config import CheckpointConf
from posttrain.training import manifest
from posttrain.training.checkpoint import complete, kind
from posttrain.training.manifest import Manifest
from posttrain.training.reference import Reference
from posttrain.training.snapshot import Snapshot, snapshot

# What each rank signs its files in, for the main rank to close the checkpoint.
SIGNED = "rank_*.signed"


class Saver:
    """Writes this rank's share of a run's checkpoints, one at a time."""

    def __init__(self, run_dir: Path, cfg: CheckpointConf, metric: str, timeout_s: float) -> None:
        """`metric`: of the evaluation, that the best checkpoint is judged by, unless checkpoint.best names another."""
        self.folder, self.cfg, self.timeout_s = run_dir / "checkpoints", cfg, timeout_s
        self.metric = cfg.best if isinstance(cfg.best, str) else metric
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._given_up = threading.Event()

    def save(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        reference: Reference | None,
        step: int,
        generators: dict[str, Any],
        evaluation: dict[str, float],
        fingerprints: dict[str, str],
    ) -> None:
        """Copy the state, and write `step_<step>` while training goes on. All ranks call it.

        The reference is written once it has moved (algorithm.kl.refresh_every); until then it is the model that the
        run started from. Raises what the writing of the checkpoint before has failed of, an OSError say.
        """
        self.wait()
        partial = self.folder / f"partial_{step:08d}"
        if dist.get_rank() == 0:
            # A run that died while it saved has left one.
            shutil.rmtree(partial, ignore_errors=True)
            self.folder.mkdir(exist_ok=True)
            partial.mkdir()
        dist.barrier()
        taken = snapshot(model, optimizer, reference, generators)
        closing = Manifest(
            step=step,
            evaluation=evaluation,
            fingerprints=fingerprints,
            world_size=dist.get_world_size(),
            files={},
            **kind(model),
        )
        self._thread = threading.Thread(
            target=self._write, args=(taken, partial, closing, dist.get_rank()), name="checkpoint", daemon=True
        )
        self._thread.start()
        if not self.cfg.asynchronous:
            self.wait()

    def check(self) -> None:
        """Raise what the writing has failed of, if it has."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Until every rank's share is on the disk, and the checkpoint has its name. A collective."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self.check()
            # The main rank has come here when the checkpoint is whole.
            dist.barrier()

    def give_up(self) -> None:
        """Wait for no other rank: the run fails. A partial checkpoint stays one."""
        self._given_up.set()
        if self._thread is not None:
            self._thread.join(self.timeout_s)
            self._thread = None

    def _write(self, taken: Snapshot, partial: Path, closing: Manifest, rank: int) -> None:
        """In a thread, without a collective: the ranks meet in the directory."""
        try:
            signed = _write_share(taken, partial, rank)
            if rank == 0:
                files = signed | self._others(partial, closing.world_size)
                _close(partial, self.folder / f"step_{closing.step:08d}", closing, files)
                self._retain()
        # Its own thread has nobody to tell: `check` raises it where the run can end.
        except BaseException as error:
            self._error = error

    def _others(self, partial: Path, ranks: int) -> dict[str, dict[str, Any]]:
        """What every rank has signed."""
        deadline = time.monotonic() + self.timeout_s
        while len(found := list(partial.glob(SIGNED))) < ranks:
            if self._given_up.is_set():
                raise RuntimeError("the run ended while its checkpoint was written")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{partial}: {len(found)} of {ranks} ranks wrote their share in {self.timeout_s} s")
            time.sleep(0.02)
        files: dict[str, dict[str, Any]] = {}
        for signed in found:
            files |= json.loads(signed.read_text())
            signed.unlink()
        return files

    def _retain(self) -> None:
        """Drop the checkpoints that no option keeps. The newest one is whole: each rank has read its share again."""
        if not self.cfg.keep_last:
            return
        every = complete(self.folder.parent)
        whole = [(folder, found) for folder in every if isinstance(found := manifest.read(folder), Manifest)]
        kept = {folder for folder, _ in whole[-self.cfg.keep_last :]}
        if self.cfg.keep_every:
            kept |= {folder for folder, found in whole if found.step % self.cfg.keep_every == 0}
        if self.cfg.best and (judged := [each for each in whole if self.metric in each[1].evaluation]):
            kept.add(max(judged, key=lambda each: each[1].evaluation[self.metric])[0])
        for folder in every:
            if folder not in kept:
                remove(folder)


def _write_share(taken: Snapshot, partial: Path, rank: int) -> dict[str, dict[str, Any]]:
    """One rank's files, on the disk and read again: what it signs for them."""
    tensors, generators = partial / f"rank_{rank:05d}.safetensors", partial / f"rank_{rank:05d}.json"
    taken.write(tensors, generators)
    for file in (tensors, generators):
        manifest.flush_to_disk(file)
    taken.check(tensors)
    signed = {file.name: manifest.signature(file) for file in (tensors, generators)}
    whole = partial / f"rank_{rank:05d}.partial"
    whole.write_text(json.dumps(signed))
    whole.rename(partial / f"rank_{rank:05d}.signed")
    return signed


def _close(partial: Path, final: Path, closing: Manifest, files: dict[str, dict[str, Any]]) -> None:
    """Write the manifest and give the directory its name: whatever happens in between, no torn checkpoint has it."""
    closing.files.update(sorted(files.items()))
    manifest.write(partial, closing)
    manifest.flush_to_disk(partial)
    if final.exists():
        # A run that resumed from an earlier one writes this step again.
        remove(final)
    partial.rename(final)
    manifest.flush_to_disk(final.parent)


def remove(folder: Path) -> None:
    """First the name, so that no half of it is taken for a checkpoint."""
    doomed = folder.with_name(f"removed_{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)
