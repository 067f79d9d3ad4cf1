"""The tiny model of each architecture that a table is asked for."""

from __future__ import annotations

import difflib
import functools
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

from posttrain.errors import UserError
from posttrain.models.architectures import architectures, tiny
from posttrain.models.internals import from_config
from posttrain.models.shrink import tiny_copy
from posttrain.models.survey.shapes import SHAPES
from posttrain.models.survey.tables import one_line

Builder = Callable[[], PreTrainedModel]


def builders(names: Sequence[str], path: str | None, shapes: bool = False) -> dict[str, Builder]:
    """What builds the tiny model of each of `names` and of the checkpoint at `path`; with neither, of every one.

    Names are of architectures, or of shapes.SHAPES; `shapes`: every one of both.

    Errors: UserError for a name that does not exist.
    """
    known = [*architectures(), *SHAPES]
    for name in (name for name in names if name not in known):
        near = difflib.get_close_matches(name, known, 3)
        instead = f"Type: {' or '.join(near)}" if near else "Without a name the table has every architecture"
        raise UserError(f"transformers knows no causal language model {name!r}. {instead}")
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # for tiny tensors more are slower
    found = {path: checkpoint(path)} if path else {}
    every = known if shapes else architectures()
    return found | {name: _builder(name) for name in names or ([] if path else every)}


def _builder(name: str) -> Builder:
    model_type, fields = SHAPES.get(name, (name, {}))
    return functools.partial(tiny, model_type, **fields)


def checkpoint(path: str) -> Builder:
    """Builds a tiny copy of the model at `path`, which is a directory or a name on the hub. Errors: UserError."""
    if path.startswith((".", "/", "~")) and not Path(path).is_dir():
        raise UserError(f"--path {path} is no directory. Give one that has a config.json, or a hub name.")
    try:
        config = AutoConfig.from_pretrained(path).get_text_config(decoder=True)
        with torch.device("meta"):
            model = from_config(config, dtype=torch.float32)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"--path {path}: {one_line(error)}. Give a directory or a hub name.") from error

    def build() -> PreTrainedModel:
        torch.manual_seed(0)
        if (small := tiny_copy(model, torch.device("cpu"), torch.float32)) is None:
            raise ValueError(f"no tiny model of the layer classes of {type(model).__name__}")
        return small.eval()

    return build
