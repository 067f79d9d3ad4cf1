"""The config.json of a checkpoint: found, checked, and rid of what no step can use."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import logging as huggingface_logging
from transformers import AutoConfig, PreTrainedConfig

from posttrain.config import Architecture, ModelConf
from posttrain.errors import UserError
from posttrain.models.internals import causal_model_class, is_made
from posttrain.models.tiny import EMBEDDED

# The model types of transformers that each named architecture accepts: the text model alone, or within the
# multimodal checkpoint (its text part is loaded).
MODEL_TYPES = {
    Architecture.qwen3_5_dense: {"qwen3_5", "qwen3_5_text"},
    Architecture.qwen3_5_moe: {"qwen3_5_moe", "qwen3_5_moe_text"},
    Architecture.qwen3_next: {"qwen3_next"},
    Architecture.qwen3_dense: {"qwen3"},
}

FLAGS = ("output_router_logits", "output_attentions", "output_hidden_states", "torchscript")  # of config.json


def weights_path(cfg: ModelConf) -> str:
    """What transformers loads from: the embedded model's directory where `model.path` is null."""
    return cfg.path if cfg.path is not None else str(EMBEDDED / cfg.architecture.value)


def load_config(cfg: ModelConf) -> PreTrainedConfig:
    """The checkpoint's text config, checked against `model.architecture`. Raises UserError."""
    return text_config(whole_config(cfg), cfg)


def whole_config(cfg: ModelConf) -> PreTrainedConfig:
    """The checkpoint's config, of a multimodal one with all its parts. Raises UserError."""
    # Else ten lines about retries come before the one that matters.
    huggingface_logging.set_verbosity_error()
    path = weights_path(cfg)
    # Hub names are name or owner/name.
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local and not Path(path).is_dir():
        raise UserError(
            f"model.path={path} is neither a directory nor a hub name. Give a local directory, a hub name such as "
            "Qwen/Qwen3.5-4B, or model.path=null for the embedded tiny model."
        )
    for file in Path(path).iterdir() if Path(path).is_dir() else ():
        if file.exists() and not (file.is_file() or file.is_dir()):
            # To open a pipe waits for whoever writes into it.
            raise UserError(f"model.path={path}: {file.name} is a pipe or a device, and no file: take it away")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            path, revision=cfg.revision, trust_remote_code=cfg.trust_remote_code
        )
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        hint = "Is the hub reachable, and the name right? A local directory also works."
        if "custom code" in str(error):
            hint = "Type model.trust_remote_code=true to run it."
        elif Path(path).is_dir():
            hint = "It needs config.json, *.safetensors and the tokenizer's files."
        raise UserError(f"model.path={path} could not be loaded: {first_line(error)}. {hint}") from error
    return config


def text_config(whole: PreTrainedConfig, cfg: ModelConf) -> PreTrainedConfig:
    """The config of the language model within `whole`. Raises UserError where it is not what `cfg` asks for."""
    path, config = weights_path(cfg), whole.get_text_config(decoder=True)
    own_code = hasattr(whole, "auto_map")
    if config is not whole and causal_model_class(type(config)) is None and not own_code:
        raise UserError(
            f"model.path={path} is a multimodal {whole.model_type!r} checkpoint, and transformers has no causal model "
            f"of its text part, {config.model_type!r}. Take a checkpoint of a text model"
        )
    if config is not whole and is_made(config):
        # Its head belongs to the whole, which says whether it is tied.
        config.tie_word_embeddings = bool(getattr(whole, "tie_word_embeddings", False))
    accepted = MODEL_TYPES.get(cfg.architecture)
    if accepted and config.model_type not in accepted:
        fitting = [name.value for name, types in MODEL_TYPES.items() if config.model_type in types] or ["auto"]
        raise UserError(
            f"model.path={path} holds a {config.model_type!r} model, and model={cfg.architecture} takes "
            f"{' or '.join(sorted(accepted))}. Type model={fitting[0]} instead."
        )
    return config


def neutralise(config: PreTrainedConfig) -> list[str]:
    """Switch off what a config.json may leave on and no step can use, or an export refuses; a note for each."""
    notes = []
    for name in FLAGS:
        if getattr(config, name, False):
            setattr(config, name, False)
            notes.append(f"{name} of config.json is switched off")
    return notes


def first_line(error: Exception) -> str:
    """The first line of an exception's message, or its name."""
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
