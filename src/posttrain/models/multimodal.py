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
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from posttrain.errors import UserError
from posttrain.models.configs import first_line
from posttrain.models.internals import convert_weights_as, from_config
from posttrain.models.shrink import shrunk
from posttrain.models.stored import INDEX, SINGLE, Stored, head_name, stored, text_prefix
from posttrain.models.text_model import HEAD, body_name, is_ours, text_model_classes

EQUAL = 1e-4  # of the largest logit, in fp32


def renamed(files: Stored, text: PreTrainedConfig, model_class: type[PreTrainedModel]) -> dict[str, str]:
    """Patterns of names in the files -> names of the text model, as from_pretrained takes them.

    Empty where the text model's names stand in the files as they are, or transformers itself knows how they are called.
    """
    with torch.device("meta"):
        bare = from_config(model_class, text)
    base = body_name(bare)
    wanted = {name: tuple(parameter.shape) for name, parameter in bare.named_parameters()}
    prefix = text_prefix(files.shapes, wanted, base)
    if prefix is None or prefix == f"{base}.":
        return {}
    head = head_name(files.shapes, HEAD)
    mapping = {f"^{re.escape(prefix)}": f"{base}."}
    return mapping | ({f"^{re.escape(head)}": HEAD} if head not in (None, HEAD) else {})


def tie_as_the_whole(whole: PreTrainedConfig, text: PreTrainedConfig, files: Stored) -> None:
    """Tie the head of the text model where only the whole config says so, and the files have no head."""
    tied = getattr(whole, "tie_word_embeddings", False)
    if tied and head_name(files.shapes, HEAD) is None:
        text.tie_word_embeddings = True


def text_model_class(whole: PreTrainedConfig, path: str) -> tuple[type[PreTrainedModel], list[str]]:
    """The causal class that writes the same logits as the text part within the multimodal class, and notes on it.

    They are compared on small random models. What cannot be built small, for a package that is not installed or a
    config that cannot be shrunk, is not compared, which a note says: its weights still have to fit, name by name.

    Raises UserError where no class writes the same logits.
    """
    candidates = text_model_classes(whole.get_text_config(decoder=True))
    if is_ours(candidates[-1]):
        convert_weights_as(whole.model_type, candidates[-1])
    differences = []
    for model_class in candidates:
        try:
            differences.append(_difference(whole, model_class))
        # A multimodal class may want pictures, or packages; its tiny config may break rules of its own.
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            return candidates[0], [f"not compared with the {whole.model_type} class as a whole ({reason[:80]})"]
        if differences[-1] <= EQUAL:
            return model_class, []
    raise UserError(
        f"model.path={path}: the text model of a {whole.model_type!r} checkpoint, taken by itself, writes other "
        f"logits than within it (by {min(differences):.2g} of the largest). Train a checkpoint of the text model alone"
    )


def _difference(whole: PreTrainedConfig, model_class: type[PreTrainedModel]) -> float:
    """Of the logits of small models with the same weights, in parts of the largest one."""
    ids_BT = torch.arange(1, 20)[None]
    with torch.random.fork_rng([]), torch.no_grad():
        torch.manual_seed(0)
        config = shrunk(whole)
        both = AutoModelForImageTextToText.from_config(config).float().eval()
        wanted_BTV = both(input_ids=ids_BT).logits
        # The head that the whole has decides, tied or not.
        inside = copy.deepcopy(config.get_text_config(decoder=True))
        inside.tie_word_embeddings = False
        text = from_config(model_class, inside).float().eval()
        held, base = both.state_dict(), body_name(text)
        shapes = {name: tuple(tensor.shape) for name, tensor in held.items()}
        prefix = text_prefix(shapes, {n: tuple(p.shape) for n, p in text.named_parameters()}, base)
        if prefix is None:
            raise ValueError("the text model has no weight of its own in it")
        inner = {
            f"{base}.{name.removeprefix(prefix)}": tensor for name, tensor in held.items() if name.startswith(prefix)
        }
        head = head_name(shapes, HEAD)
        inner[HEAD] = both.get_input_embeddings().weight if head is None else held[head]
        text.load_state_dict(inner, strict=False)
        found_BTV = text(input_ids=ids_BT).logits
    return float((found_BTV - wanted_BTV).abs().max() / wanted_BTV.abs().max())


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
