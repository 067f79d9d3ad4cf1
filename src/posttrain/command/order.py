"""A job in a file: job.json, and of a resumed run job.next.json until training goes on. Neither holds a secret.

What came from the environment (`${oc.env:NAME}`) stays as it was written, and each rank resolves it for itself.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from posttrain.config.validation import plain

_FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*['\"]?(\w+)")
# An interpolation by a resolver of the project: its result is no text of the environment.
_COMPUTED = re.compile(r"\$\{(?!oc\.env:)\w+:")


def read_order(run_dir: Path) -> dict[str, Any]:
    """The values of the job that the ranks are started for."""
    waiting = run_dir / "job.next.json"
    path = waiting if waiting.exists() else run_dir / "job.json"
    return resolved(json.loads(path.read_text(encoding="utf-8")))


def resolved(values: dict[str, Any]) -> dict[str, Any]:
    """The same values with what they take from the environment."""
    if "${" not in json.dumps(values):
        return values
    return plain(OmegaConf.create(values), resolve=True)


def without_secrets(cfg: DictConfig, values: dict[str, Any]) -> dict[str, Any]:
    """`values`, which are `cfg` resolved, with the text of `cfg` wherever a value holds one of the environment."""
    written = plain(cfg, resolve=False, enum_to_str=True)
    names = {name for text in _texts(written) for name in _FROM_ENVIRONMENT.findall(text)}
    secrets = {os.environ[name] for name in names if os.environ.get(name)}

    def masked(value: Any, text: Any) -> Any:
        if isinstance(value, dict) and isinstance(text, dict):
            return {key: masked(each, text.get(key)) for key, each in value.items()}
        if isinstance(value, list) and isinstance(text, list) and len(value) == len(text):
            return [masked(each, its_text) for each, its_text in zip(value, text, strict=True)]
        if not isinstance(text, str) or "${" not in text or _COMPUTED.search(text):
            return value
        holds_one = any(secret in str(value) for secret in secrets)
        return text if holds_one or _FROM_ENVIRONMENT.search(text) else value

    return {key: masked(value, written.get(key)) for key, value in values.items()}


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _texts(each)
