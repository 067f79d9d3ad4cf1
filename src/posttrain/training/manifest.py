"""What vouches for a checkpoint: the size and SHA-256 of each of its files, written last.

A directory without a manifest is no checkpoint. A file that a disk, a copy or a hand has changed since is named before
anything of it is read.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
# Of the layout: checkpoints of another one are refused.
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Of one checkpoint."""

    step: int  # steps that were done
    model: str  # the architecture
    parameters: int
    world_size: int  # ranks that wrote it
    evaluation: dict[str, float]  # of this step, or empty
    fingerprints: dict[str, str]  # of what the run reads: data, model files
    files: dict[str, dict[str, Any]]  # {"bytes": ..., "sha256": ...} by name
    format: int = FORMAT


def signature(file: Path) -> dict[str, Any]:
    """Size and SHA-256 of what the disk gives back."""
    with file.open("rb") as stream:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def write(folder: Path, manifest: Manifest) -> None:
    """The last file of a checkpoint, which is a checkpoint from then on."""
    values = asdict(manifest)
    write_durably(folder / MANIFEST, json.dumps(values | {"sha256": _digest(values)}, indent=1))


def read(folder: Path) -> Manifest | str:
    """The manifest of a checkpoint, or what is wrong with it in words."""
    try:
        values = json.loads((folder / MANIFEST).read_bytes())
        digest = values.pop("sha256")
        if values.get("format") != FORMAT:
            return f"{MANIFEST} is of format {values.get('format')}, and this version reads {FORMAT}"
        if digest != _digest(values):
            return f"{MANIFEST} is not as it was written"
        return Manifest(**values)
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    # Bytes that are no UTF-8, no JSON, no object, or lack a field.
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"


def wrong(folder: Path, name: str, promised: dict[str, Any]) -> str | None:
    """What is wrong with one file of a checkpoint in words; None: it is as it was written."""
    # To open a pipe waits for whoever writes into it.
    if not (folder / name).is_file():
        return f"{name} is {'no file' if (folder / name).exists() else 'missing'}"
    try:
        found = signature(folder / name)
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    if found["bytes"] != promised["bytes"]:
        return f"{name} has {found['bytes']:,} bytes of {promised['bytes']:,}"
    return None if found == promised else f"{name} is damaged: its SHA-256 is not the one that was written"


def write_durably(file: Path, text: str) -> None:
    """`file` as a whole, on the disk before this returns."""
    with file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def flush_to_disk(path: Path) -> None:
    """What a file holds, or which names a directory has, outlives a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
