"""What a run reads, in a few words each: a resumed run is told when its data or its model's files are others by now."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path

from posttrain.config import JobConf, ModelConf
from posttrain.config.reward import RewardConf
from posttrain.models.configs import weights_path
from posttrain.records import Problem

# A file of weights is told by its size, its first and its last megabyte: to read all takes minutes.
ENDS = 2**20
FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")


def fingerprints(problems: Iterable[Problem], cfg: JobConf) -> dict[str, str]:
    """Of the training problems as the model sees them, of the model's files, and of the user's rewards."""
    found = {"problems": _of_problems(problems), "model files": _of_model(cfg.model)}
    return found | ({"rewards": _of_rewards(cfg.reward)} if cfg.reward.python else {})


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """A line for each thing that is not what it was."""
    return [
        f"the {name} are not those that the run has read so far ({then[name]}; now {now[name]})"
        for name in now
        if name in then and then[name] != now[name]
    ]


def _of_problems(problems: Iterable[Problem]) -> str:
    digest, count = hashlib.sha256(), 0
    for problem in problems:
        digest.update(array("q", problem.prompt_ids).tobytes())
        digest.update(json.dumps(problem.answer, default=str).encode())
        count += 1
    return f"{count:,} problems, SHA-256 {digest.hexdigest()[:12]}"


def _of_rewards(cfg: RewardConf) -> str:
    places = [cfg.python] if isinstance(cfg.python, str) else cfg.python
    files = sorted({place.rpartition(":")[0] for place in places})
    digest = hashlib.sha256(b"".join(Path(file).read_bytes() for file in files))
    return f"{', '.join(Path(file).name for file in files)}, SHA-256 {digest.hexdigest()[:12]}"


def _of_model(cfg: ModelConf) -> str:
    path = Path(weights_path(cfg))
    if not path.is_dir():
        # A name on the hub, which revisions tell apart.
        return f"{path} at revision {cfg.revision or 'main'}"
    digest = hashlib.sha256()
    files = sorted({file for pattern in FILES for file in path.glob(pattern) if file.is_file()})
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(ENDS))
            if size > 2 * ENDS:
                stream.seek(-ENDS, 2)
                digest.update(stream.read(ENDS))
            else:
                digest.update(stream.read())
    return f"{len(files)} files, SHA-256 {digest.hexdigest()[:12]}"
