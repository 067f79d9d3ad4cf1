"""The text model of a multimodal checkpoint: under which names its weights lie, and whether it writes the same logits.

Most multimodal classes of transformers hold a text model of a class of its own, whose causal language model can be
trained alone. Some change the logits on the way, or hold text layers that no causal model has.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from posttrain.errors import UserError
from posttrain.models.shrink import shrunk
from posttrain.models.stored import INDEX, SINGLE, Stored, head_name, stored, text_prefix

EQUAL = 1e-4  # of the largest logit, in fp32


def renamed(files: Stored, text: PreTrainedConfig) -> dict[str, str]:
    """Patterns of names in the files -> names of the text model, as from_pretrained takes them.

    Empty where the text model's names stand in the files as they are, or transformers itself knows how they are called.
    """
    with torch.device("meta"):
        bare = AutoModelForCausalLM.from_config(text)
    base = bare.base_model_prefix
    wanted = {name: tuple(parameter.shape) for name, parameter in bare.named_parameters()}
    prefix = text_prefix(files.shapes, wanted, base)
    if prefix is None or prefix == f"{base}.":
        return {}
    head = head_name(files.shapes, "lm_head.weight")
    mapping = {f"^{re.escape(prefix)}": f"{base}."}
    return mapping | ({f"^{re.escape(head)}": "lm_head.weight"} if head not in (None, "lm_head.weight") else {})


def tie_as_the_whole(whole: PreTrainedConfig, text: PreTrainedConfig, files: Stored) -> None:
    """Tie the head of the text model where only the whole config says so, and the files have no head."""
    tied = getattr(whole, "tie_word_embeddings", False)
    if tied and head_name(files.shapes, "lm_head.weight") is None:
        text.tie_word_embeddings = True


def check_same_logits(whole: PreTrainedConfig, path: str) -> None:
    """On small random models: the multimodal class and the causal model of its text part write the same logits.

    Raises UserError where they do not. What cannot be built small, for a package that is not installed or a config that
    cannot be shrunk, is not compared: its weights still have to fit, name by name.
    """
    ids_BT = torch.arange(1, 20)[None]
    with torch.random.fork_rng([]), torch.no_grad():
        torch.manual_seed(0)
        try:
            config = shrunk(whole)
            both = AutoModelForImageTextToText.from_config(config).float().eval()
            # The head that the whole has decides, tied or not.
            inside = copy.deepcopy(config.get_text_config(decoder=True))
            inside.tie_word_embeddings = False
            text = AutoModelForCausalLM.from_config(inside).float().eval()
            wanted_BTV = both(input_ids=ids_BT).logits
        # A multimodal class may want pictures, or packages; its tiny config may break rules of its own.
        except Exception:
            return
        held = {name: tuple(tensor.shape) for name, tensor in both.state_dict().items()}
        prefix = text_prefix(held, {n: tuple(p.shape) for n, p in text.named_parameters()}, text.base_model_prefix)
        if prefix is None:
            return
        inner = {
            f"{text.base_model_prefix}.{name.removeprefix(prefix)}": tensor
            for name, tensor in both.state_dict().items()
            if name.startswith(prefix)
        }
        head = head_name(held, "lm_head.weight")
        inner["lm_head.weight"] = both.get_input_embeddings().weight if head is None else both.state_dict()[head]
        text.load_state_dict(inner, strict=False)
        found_BTV = text(input_ids=ids_BT).logits
    difference = float((found_BTV - wanted_BTV).abs().max() / wanted_BTV.abs().max())
    if not difference <= EQUAL:
        raise UserError(
            f"model.path={path}: the text model of a {whole.model_type!r} checkpoint, taken by itself, writes other "
            f"logits than within it (by {difference:.2g} of the largest). Train a checkpoint of the text model alone"
        )


def add_other_parts(export: Path, source: str, revision: str | None, whole: PreTrainedConfig) -> None:
    """Make an exported text model the whole checkpoint again: the other parts unchanged, the whole config.

    `export` holds the text model under the names that it has in `source`. The other parts go into files of their own,
    and an index names them all. Weights that have other names there stay a text model by itself, which a line says.
    """
    files, written = stored(source, revision), stored(str(export), None)
    if files is None or written is None or not written.shapes.keys() <= files.shapes.keys():
        print(f"the exported model is the text model alone: its weights have other names in {source}")
        return
    others = [name for name in files.shapes if name not in written.shapes]
    weight_map = {name: file.name for name, file in written.files.items()}
    for number, file in enumerate(sorted({files.files[name] for name in others})):
        with safe_open(file, framework="pt") as tensors:
            part = {name: tensors.get_tensor(name) for name in others if files.files[name] == file}
        own = f"model-other-{number:05d}.safetensors"
        save_file(part, export / own, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, own)
    if others:
        text = "model-text.safetensors"
        if (export / SINGLE).is_file():
            shutil.move(export / SINGLE, export / text)
            weight_map = {name: text if file == SINGLE else file for name, file in weight_map.items()}
        (export / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2))
    trained = PreTrainedConfig.get_config_dict(str(export))[0]
    config = copy.deepcopy(whole)
    config.dtype = trained.get("dtype")
    config.save_pretrained(export)
