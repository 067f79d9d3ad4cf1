"""What a checkpoint holds, by the headers of its safetensors files: names and shapes, and no weight.

A multimodal checkpoint has its text model's weights under a prefix such as `model.language_model.`. It is found from
the names and shapes in the files, for there are as many prefixes as model classes.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers.utils import cached_file

from posttrain.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Of a text model's own checkpoint: other parts of a multimodal one, a head for several tokens at a time, and buffers
# that are computed.
OTHER_PARTS = re.compile(
    r"(^|\.)(visual|vision\w*|image\w*|video\w*|audio\w*|speech\w*|sound\w*|multi_modal\w*|mm_\w+|mtp\w*|"
    r"\w*projector\w*|\w*connector\w*|qformer|query_tokens|resampler|aligner|adapter|vqmodel|view_separator|"
    r"language_projection|embed_vision|embed_audio|generation\w*)(\.|$)|rotary_emb\.inv_freq$|\.rotary_emb\.\w+$"
)

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Stored:
    """The tensors of a checkpoint."""

    shapes: Shapes
    files: dict[str, Path]  # of each tensor


def stored(path: str, revision: str | None) -> Stored | None:
    """Of a local directory or a hub name; None if it has no safetensors files, which loading will say.

    Raises UserError, with the file, for a Git LFS pointer, a truncated file or a shard that is missing.
    """
    index = file_of(path, INDEX, revision)
    if index is None:
        single = file_of(path, SINGLE, revision)
        files = [] if single is None else [single]
    else:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        found = {name: file_of(path, name, revision) for name in names}
        if missing := [name for name, file in found.items() if file is None]:
            raise UserError(f"model.path={path}: {index.name} names {missing[0]}, and it is not there: copy it again")
        files = [file for file in found.values() if file is not None]
    if not files:
        return None
    shapes: Shapes = {}
    places: dict[str, Path] = {}
    for file in files:
        for name, shape in header(file).items():
            shapes[name], places[name] = shape, file
    return Stored(shapes, places)


def file_of(path: str, name: str, revision: str | None) -> Path | None:
    """A file of a checkpoint in a local directory or on the hub; None if it has none of this name."""
    if Path(path).is_dir():
        file = Path(path, name)
        return file if file.is_file() else None
    found = cached_file(path, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def header(file: Path) -> Shapes:
    """Names and shapes of one safetensors file. Raises UserError for a file that is not whole."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if start.startswith(b"version "):
            raise UserError(f"{file} is a Git LFS pointer and holds no weights: type git lfs pull in its directory")
        length = int.from_bytes(start, "little")
        text = stream.read(length) if 8 + length <= size else b""
    try:
        entries = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is no whole safetensors file: copy it again") from error
    if 8 + length + end != size:
        raise UserError(f"{file} is truncated: it has {size:,} bytes of {8 + length + end:,}. Copy it again")
    return {name: tuple(entry["shape"]) for name, entry in entries.items()}


def text_prefix(shapes: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], base: str) -> str | None:
    """What stands before the names of the text model in a file, in place of `base` + ".", None if nothing fits.

    `wanted` are names and shapes of the text model alone; the prefix is the one that the most of them have in the file
    with the same shape. Of the vision tower, whose layers may have the same names, fewer fit.
    Raises ValueError where two parts fit as well.
    """
    inner = {name.removeprefix(f"{base}."): shape for name, shape in wanted.items() if name.startswith(f"{base}.")}
    votes: Counter[str] = Counter()
    for stored_name, shape in shapes.items():
        for start in _starts(stored_name):
            if inner.get(stored_name[start:]) == shape:
                votes[stored_name[:start]] += 1
    if not votes:
        return None
    (prefix, most), *others = votes.most_common()
    if others and others[0][1] == most:
        raise ValueError(f"its weights may be {prefix}* as well as {others[0][0]}*")
    return prefix


def text_names(shapes: Shapes, wanted: Shapes, base: str) -> dict[str, str]:
    """Patterns of names in the files -> names of the text model `wanted`, for renaming in this order; empty if equal.

    Beside the prefix of `text_prefix` a part of the text model may have another name: its layers are `blocks` where
    transformers wrote a Kimi again, and only they lie under `encoder.` of a Qianfan.
    """
    prefix = text_prefix(shapes, wanted, base)
    if prefix is None:
        return {}
    found = {} if prefix == f"{base}." else {f"^{re.escape(prefix)}": f"{base}."}
    inner = {name.removeprefix(f"{base}."): shape for name, shape in wanted.items() if name.startswith(f"{base}.")}
    for part in dict.fromkeys(name.partition(".")[0] for name in inner):
        if any(f"{name}.".startswith(f"{prefix}{part}.") for name in shapes):
            continue
        tails = {name.removeprefix(part): shape for name, shape in inner.items() if name.startswith(f"{part}.")}
        # Layers are known by what is in them, anything else by its name.
        same = re.compile(r"\.\d+\." if all(re.match(r"\.\d+\.", tail) for tail in tails) else rf"(^|\.){part}\.")
        votes: Counter[str] = Counter()
        for name, shape in shapes.items():
            for tail in (tail for tail, size in tails.items() if size == shape and name.endswith(tail)):
                if same.search(name):
                    votes[name.removesuffix(tail)] += 1
        if votes:
            # The vision tower may have such a part as well: what lies nearest to the rest of the text model is its.
            where = max(votes, key=lambda name: (len(os.path.commonprefix([name, prefix])), votes[name]))
            where = f"{base}.{where.removeprefix(prefix)}" if where.startswith(prefix) else where
            found[f"^{re.escape(where)}\\."] = f"{base}.{part}."
    return found


def _starts(name: str) -> Iterable[int]:
    """Where a dotted name's parts begin."""
    yield 0
    for found in re.finditer(r"\.", name):
        yield found.end()


def head_name(shapes: Mapping[str, tuple[int, ...]], head: str) -> str | None:
    """The name of the head in a file: its own, or the shortest that ends with it."""
    ending = [name for name in shapes if name == head or name.endswith(f".{head}")]
    return min(ending, key=len, default=None)
