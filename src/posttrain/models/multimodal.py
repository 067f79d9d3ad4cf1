"""The text model of a multimodal checkpoint: under which names its weights lie, and whether it writes the same logits.

Most multimodal classes of transformers hold a text model of a class of its own, whose causal language model can be
trained alone. Some change the logits on the way, or hold text layers that no causal model has.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import textwrap
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel

from posttrain.errors import UserError
from posttrain.models.configs import first_line
from posttrain.models.internals import convert_as, from_config, is_made
from posttrain.models.shrink import shrunk
from posttrain.models.stored import INDEX, SINGLE, Stored, file_of, head_name, stored, text_names, text_prefix

EQUAL = 1e-4  # of the largest logit, in fp32
# Without these files nobody could give the whole a picture, or load Qwen2.5-Omni at all.
OF_OTHER_PARTS = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
    "spk_dict.pt",
)


def renamed(files: Stored, text: PreTrainedConfig) -> dict[str, str]:
    """Patterns of names in the files -> names of the text model, as from_pretrained takes them.

    Empty where the text model's names stand in the files as they are, or transformers itself knows how they are called.
    """
    with torch.device("meta"):
        bare = from_config(text)
    wanted = {name: tuple(parameter.shape) for name, parameter in bare.named_parameters()}
    # The talker of an omni model has a text model, too.
    thinker = {name: shape for name, shape in files.shapes.items() if name.startswith("thinker.")}
    shapes = thinker or files.shapes
    names = text_names(shapes, wanted, base_name(bare))
    head = head_name(shapes, "lm_head.weight")
    return names | ({f"^{re.escape(head)}": "lm_head.weight"} if names and head not in (None, "lm_head.weight") else {})


def base_name(model: PreTrainedModel) -> str:
    """The name of the module that holds the text model without its head."""
    embeddings = model.get_input_embeddings()
    # Not always `base_model_prefix`, which of Llama 4 is that of the whole.
    return next(name for name, module in model.named_modules() if module is embeddings).partition(".")[0]


def prepare(whole: PreTrainedConfig, text: PreTrainedConfig, files: Stored, path: str) -> dict[str, str]:
    """Make `text` the config of a causal language model that is the text model within the whole; `renamed`.

    Raises UserError where the two write other logits, or where transformers has no causal model and the whole cannot be
    tried either.
    """
    tied = compared(whole, path)
    if tied is None:
        # Only the whole config may say so, and the files have no head then.
        without_head = head_name(files.shapes, "lm_head.weight") is None
        tied = getattr(text, "tie_word_embeddings", False) or getattr(whole, "tie_word_embeddings", False)
        tied = tied and (without_head or getattr(text, "tie_word_embeddings", False))
    text.tie_word_embeddings = bool(tied)
    convert_as(whole, text)
    return renamed(files, text)


def compared(whole: PreTrainedConfig, path: str) -> bool | None:
    """On small random models: the multimodal class and the causal model of its text part write the same logits.

    Returns whether the whole ties its head to its embeddings. Raises UserError where the logits differ. None stands for
    what cannot be built small, for a package that is not installed or a config that cannot be shrunk: its weights still
    have to fit, name by name. Where the causal model is of our making that is a UserError, too.
    """
    with torch.random.fork_rng([]), torch.no_grad():
        torch.manual_seed(0)
        try:
            found = _small(whole)
        # A multimodal class may want pictures, or packages; its tiny config may break rules of its own.
        except Exception as error:
            if not is_made(whole.get_text_config(decoder=True)):
                return None
            reason = textwrap.shorten(first_line(error), 160)
            raise UserError(
                f"model.path={path}: no small {whole.model_type!r} model can be tried ({reason}), which would show "
                "whether its text model is right by itself. Train a checkpoint of the text model alone"
            ) from error
    if not found.difference <= EQUAL:
        scale = getattr(whole.get_text_config(decoder=True), "logit_scale", None)
        instead = "Train a checkpoint of the text model alone"
        if scale not in (None, 1):
            instead = f"The whole leaves out logit_scale={scale}: write 1.0 in the text_config of config.json"
        raise UserError(
            f"model.path={path}: the text model of a {whole.model_type!r} checkpoint, taken by itself, writes other "
            f"logits than within it (by {found.difference:.2g} of the largest). {instead}"
        )
    return found.tied


class _Found(NamedTuple):
    difference: float  # of the logits, relative to the largest
    tied: bool  # the head of the whole to its embeddings


def _small(whole: PreTrainedConfig) -> _Found:
    """What small random models show. Raises whatever a multimodal class may raise on text alone."""
    ids_BT = torch.arange(2, 21)[None]
    config = shrunk(getattr(whole, "thinker_config", whole))
    inside = config.get_text_config(decoder=True)
    # Gemma 4 looks for the tokens of pictures, and puts padding there: none of these is among the ids.
    for part in (config, inside):
        for name in [name for name in vars(part) if name.endswith("token_id") and getattr(part, name) is None]:
            setattr(part, name, 0)
    both = AutoModelForMultimodalLM.from_config(config).float().eval()
    # The head that the whole has decides, tied or not.
    inside = copy.deepcopy(inside)
    inside.tie_word_embeddings = False
    text = from_config(inside).float().eval()
    weights = both.state_dict()
    held = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    base = base_name(text)
    prefix = text_prefix(held, {n: tuple(p.shape) for n, p in text.named_parameters()}, base)
    if prefix is None:
        raise ValueError("it holds no weights of a text model")
    inner = {f"{base}.{n.removeprefix(prefix)}": tensor for n, tensor in weights.items() if n.startswith(prefix)}
    head, embeddings = head_name(held, "lm_head.weight"), both.get_input_embeddings().weight
    inner["lm_head.weight"] = embeddings if head is None else weights[head]
    text.load_state_dict(inner, strict=False)
    wanted_BTV, found_BTV = both(input_ids=ids_BT).logits, text(input_ids=ids_BT).logits
    tied = head is None or weights[head].data_ptr() == embeddings.data_ptr()
    return _Found(float((found_BTV - wanted_BTV).abs().max() / wanted_BTV.abs().max()), tied)


def add_other_parts(export: Path, source: str, revision: str | None, whole: PreTrainedConfig) -> None:
    """Make an exported text model the whole checkpoint again: the other parts unchanged, the whole config.

    `export` holds the text model under the names that it has in `source`. The other parts go into files of their own,
    and an index names them all. What prepares pictures, videos and sound is copied, too. Weights that have other names
    there stay a text model by itself, which a line says.
    """
    files, written = stored(source, revision), stored(str(export), None)
    if files is None or written is None or not written.shapes.keys() <= files.shapes.keys():
        print(f"the exported model is the text model alone: its weights have other names in {source}")
        return
    # A tied head may stand in the files beside the embeddings: the trained embeddings are both.
    tied = head_name(files.shapes, "lm_head.weight")
    if tied is not None and files.shapes[tied] not in written.shapes.values():
        # It is that of another part.
        tied = None
    others = [name for name in files.shapes if name not in written.shapes and name != tied]
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
    for name in OF_OTHER_PARTS:
        if (beside := file_of(source, name, revision)) is not None and not (export / name).exists():
            shutil.copyfile(beside, export / name)
    trained = PreTrainedConfig.get_config_dict(str(export))[0]
    config = copy.deepcopy(whole)
    config.dtype = trained.get("dtype")
    config.save_pretrained(export)
