"""The trained model as a Hugging Face checkpoint: for inference, for another run, within its multimodal checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.config import ModelConf
from posttrain.models.configs import whole_config
from posttrain.models.multimodal import add_other_parts
from posttrain.training.manifest import flush_to_disk


def export(
    accelerator: Accelerator, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, path: Path, cfg: ModelConf
) -> None:
    """Write the weights of all ranks to `path`, see `write`. A collective.

    They are written aside and get their name when they are whole, and on the disk.
    """
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        partial = path.with_name(f"{path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        write(accelerator.unwrap_model(model), state, tokenizer, partial, cfg)
        for file in partial.iterdir():
            flush_to_disk(file)
        if path.exists():
            # Of the same run, which had fewer steps.
            shutil.rmtree(path)
        partial.rename(path)
    dist.barrier()


def write(
    model: PreTrainedModel,
    state: Mapping[str, torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    cfg: ModelConf,
) -> None:
    """Write `state`, the weights of `model`, as safetensors in the dtype and under the names that they came with.

    A weight that two modules share is written once. The text model of a multimodal checkpoint (`cfg.path`) is written
    within it: the other parts are copied unchanged.
    """
    dtype = model.config.dtype or torch.float32
    once = {name for name, _ in model.named_parameters()}
    again = {name for name, _ in model.named_parameters(remove_duplicate=False)} - once
    model.save_pretrained(path, state_dict={n: value.to(dtype) for n, value in state.items() if n not in again})
    # transformers has put the master weights' fp32 there.
    model.config.dtype = dtype
    model.config.save_pretrained(path)
    tokenizer.save_pretrained(path)
    if cfg.path is None:
        return
    whole = whole_config(cfg)
    if whole.get_text_config(decoder=True) is not whole:
        add_other_parts(path, cfg.path, cfg.revision, whole)
