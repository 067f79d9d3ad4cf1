"""What the end of a run writes, tried at its start: exported, loaded again, and compared."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.config import Architecture, ModelConf
from posttrain.errors import UserError
from posttrain.models.loading import load
from posttrain.training.export import write


def export_and_reload(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cfg: ModelConf, texts: Sequence[str]
) -> list[str]:
    """What is different after an export and a load: [] where weights, tokenizer and end tokens are the same.

    Weights are compared in the dtype that the export writes; `texts` are tokenized by both tokenizers. Raises UserError
    where the export cannot be written or read.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        try:
            write(model, model.state_dict(), tokenizer, path, cfg)
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            raise UserError(f"the export fails: {str(error).splitlines()[0]}") from error
        conf = dataclasses.replace(cfg, architecture=Architecture.auto, path=str(path), revision=None)
        again, other = load(conf)
        return _weights(model, again) + _tokens(tokenizer, other, texts) + _generation(model, again)


def _weights(model: PreTrainedModel, again: PreTrainedModel) -> list[str]:
    written = model.config.dtype or torch.float32
    before, after = model.state_dict(), again.state_dict()
    if before.keys() != after.keys():
        return [f"weights have other names, such as {sorted(before.keys() ^ after.keys())[0]}"]
    changed = [name for name, value in before.items() if not torch.equal(value.to(written), after[name].to(written))]
    return [f"{len(changed)} weights have other values, such as {changed[0]}"] if changed else []


def _tokens(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[str]:
    found = []
    if any(one(text)["input_ids"] != other(text)["input_ids"] for text in texts):
        found.append("the tokenizer makes other ids of the same text")
    if one.chat_template != other.chat_template:
        found.append("the chat template is another one")
    for name in ("eos_token_id", "pad_token_id"):
        if getattr(one, name) != getattr(other, name):
            found.append(f"the tokenizer's {name} was {getattr(one, name)} and is {getattr(other, name)}")
    return found


def _generation(model: PreTrainedModel, again: PreTrainedModel) -> list[str]:
    before, after = (m.generation_config.eos_token_id for m in (model, again))
    return [] if before == after else [f"the generation config's end tokens were {before} and are {after}"]
