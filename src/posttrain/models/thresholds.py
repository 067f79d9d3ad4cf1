"""Lengths at which a model computes something else: LongRoPE's factors, a temperature by position, sparse attention.

Below them a probe sees nothing: Phi-3.5 with LongRoPE packs to 4e-7, and beside a document beyond 4,096 tokens another
one of 40 tokens moves by 3 nats. So probes also run on a copy whose thresholds are lower than their documents.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig

BELOW = 16  # tokens: the probes' documents and prompts are shorter and longer
NAMES = r"floor_scale|\w*n_floor|index_topk|original_max_position_embeddings"
# Of rotary embeddings that switch or grow at a length, and the field that holds it.
SWITCHING = {"longrope": "original_max_position_embeddings", "dynamic": "max_position_embeddings"}


def thresholds(config: PreTrainedConfig) -> dict[str, int]:
    """Field of the config -> tokens; {} for a model that is the same at every length. Windows and chunks are not here.

    They are lowered in every tiny copy, since all packing has to be right beyond them.
    """
    return {name: holder[name] for holder, name in _places(vars(config))}


def lowered(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy with each threshold at `BELOW` tokens."""
    config = copy.deepcopy(config)
    for holder, name in list(_places(vars(config))):
        holder[name] = BELOW
    return config


def _places(fields: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """(the dict that holds it, its name) of each threshold among the fields of a config."""
    switching = {kind for rope in _ropes(fields) if (kind := rope.get("rope_type")) in SWITCHING}
    for name, value in fields.items():
        # The original length says something only where frequencies switch at it.
        counts = "original" not in name or "longrope" in switching
        if type(value) is int and re.fullmatch(NAMES, name) and counts:
            yield fields, name
    if "dynamic" in switching and type(fields.get("max_position_embeddings")) is int:
        yield fields, "max_position_embeddings"
    for rope in _ropes(fields):
        field = SWITCHING.get(str(rope.get("rope_type")))
        if field is not None and type(rope.get(field)) is int:
            yield rope, field


def _ropes(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The parameters of rotary embeddings: of all layers, or of each kind of layer."""
    ropes = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if isinstance(ropes, dict):
        yield from [ropes] if "rope_type" in ropes else [rope for rope in ropes.values() if isinstance(rope, dict)]
