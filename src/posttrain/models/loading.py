"""From `model.path` to a causal language model in fp32 and its tokenizer."""

from __future__ import annotations

import inspect
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import is_flash_attn_2_available
from transformers.utils import logging as transformers_logging

from posttrain.config import Dtype, ModelConf
from posttrain.errors import UserError
from posttrain.models import multimodal
from posttrain.models.chat import turn_end
from posttrain.models.configs import first_line, load_config, neutralise, text_config, weights_path, whole_config
from posttrain.models.internals import (
    causal_model_class,
    from_config,
    from_pretrained,
    registered,
    takes_flash_attention,
)
from posttrain.models.stored import OTHER_PARTS, Stored, stored
from posttrain.models.tiny import tiny_config, tiny_tokenizer


def compute_dtype(cfg: ModelConf) -> torch.dtype:
    """The dtype that matrix multiplications run in; parameters stay fp32."""
    if cfg.dtype is Dtype.auto:
        return torch.bfloat16 if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else torch.float32
    return {Dtype.bf16: torch.bfloat16, Dtype.fp32: torch.float32}[cfg.dtype]


def attention(cfg: ModelConf, config: PreTrainedConfig) -> str | None:
    """transformers' attn_implementation for `cfg.attention`; None lets transformers choose (sdpa, or eager)."""
    if cfg.attention == "flex_attention" and not torch.cuda.is_available():
        raise UserError("model.attention=flex_attention has no backward on a CPU. Type model.attention=sdpa instead.")
    if cfg.attention not in ("auto", "eager", *registered(AttentionInterface)):
        known = ", ".join(["auto", "eager", *registered(AttentionInterface)])
        raise UserError(f"model.attention={cfg.attention} is not known to transformers. Type one of: {known}")
    if cfg.attention != "auto":
        return cfg.attention
    # None stands for a checkpoint's own code.
    model_class = causal_model_class(type(config))
    takes_it = takes_flash_attention(model_class)
    half = compute_dtype(cfg) is torch.bfloat16
    runs = takes_it and half and torch.cuda.is_available() and is_flash_attn_2_available()
    return "flash_attention_2" if runs else None


def describe(cfg: ModelConf) -> str:
    """The weights in words, for the banner and the summary."""
    if cfg.path is None:
        return f"embedded tiny {cfg.architecture}: model.path= takes real weights"
    return cfg.path if cfg.revision is None else f"{cfg.path}@{cfg.revision}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checkpoint in memory."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    notes: tuple[str, ...]  # what was left out or changed, for the banner


def load(cfg: ModelConf) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and the tokenizer of `load_checkpoint`."""
    loaded = load_checkpoint(cfg)
    return loaded.model, loaded.tokenizer


def load_checkpoint(cfg: ModelConf) -> Loaded:
    """Load fp32 weights (safetensors only) and the tokenizer, on the CPU.

    Of a multimodal checkpoint the text model. Raises UserError: the path is no model, is of another architecture, lacks
    weights or has some that the model has no place for, or the hub cannot be reached.
    """
    # Each rank would show one, for a load that takes a moment.
    transformers_logging.disable_progress_bar()
    path = weights_path(cfg)
    whole = whole_config(cfg)
    config = text_config(whole, cfg)
    notes = neutralise(config)
    stored_dtype = config.dtype
    source: dict[str, Any] = dict(revision=cfg.revision, trust_remote_code=cfg.trust_remote_code)
    names: dict[str, str] = {}
    files = None
    try:
        tokenizer = load_tokenizer(cfg)
        files = stored(path, cfg.revision)
        if config is not whole and files is not None and causal_model_class(type(config)) is not None:
            names = multimodal.prepare(whole, config, files, path)
        loaded = from_pretrained(
            path,
            config,
            dtype=torch.float32,
            attn_implementation=attention(cfg, config),
            use_safetensors=True,
            output_loading_info=True,
            **({"key_mapping": names} if names else {}),
            **source,
        )
        model, found = loaded
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise UserError(f"model.path={path}: {other_shape(files, config) or first_line(error)}") from error
    lacking = sorted(map(str, [*found["missing_keys"], *found["mismatched_keys"]]))
    # transformers would train them from random values, after a warning.
    if lacking:
        raise UserError(f"model.path={path} lacks {len(lacking)} weights of the model, such as {lacking[0]}")
    unexpected = sorted(found["unexpected_keys"])
    # A multimodal checkpoint's other parts may have any name.
    placeless = [] if config is not whole else [name for name in unexpected if not OTHER_PARTS.search(name)]
    if placeless:
        raise UserError(
            f"model.path={path} holds {len(placeless)} weights that its config.json has no place for, such as "
            f"{placeless[0]}: training would go on without them"
        )
    if unexpected:
        parts = sorted({".".join(name.split(".")[:2]) for name in unexpected})
        notes.append(f"left out of the checkpoint: {len(unexpected)} weights of {', '.join(parts[:4])}")
    _ready(model, tokenizer, cfg, stored_dtype)
    notes += check_export(model, tokenizer, path)
    return Loaded(model=model, tokenizer=tokenizer, notes=tuple(notes))


def other_shape(files: Stored | None, config: PreTrainedConfig) -> str | None:
    """The first weight that files and the model of a config have in different shapes, in words; None without one."""
    with torch.device("meta"):
        bare = from_config(config)
    for name, parameter in bare.named_parameters():
        if files and files.shapes.get(name, tuple(parameter.shape)) != tuple(parameter.shape):
            return f"{name} has the shape {files.shapes[name]}, and config.json says {tuple(parameter.shape)}"
    return None


def load_tokenizer(cfg: ModelConf) -> PreTrainedTokenizerBase:
    """Raises UserError where there is none."""
    path = weights_path(cfg)
    # Without any file transformers makes an empty tokenizer of the class that goes with config.json.
    files = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "*.spm")
    if Path(path).is_dir() and not any(file for name in files for file in Path(path).glob(name)):
        raise UserError(f"model.path={path} has no tokenizer: copy tokenizer.json and tokenizer_config.json there")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, revision=cfg.revision, trust_remote_code=cfg.trust_remote_code
        )
    # What a tokenizer's files may lead to: KeyError and TypeError are of files that are none.
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        raise UserError(f"model.path={path} has no tokenizer that can be read: {first_line(error)}") from error
    return tokenizer


def initialise(cfg: ModelConf) -> Loaded:
    """As `load_checkpoint`, with random weights from torch's generator: of the embedded shape, or of `model.path`'s."""
    tokenizer: PreTrainedTokenizerBase
    if cfg.path is None:
        config, tokenizer = tiny_config(cfg.architecture.value), tiny_tokenizer()
    else:
        config, tokenizer = load_config(cfg), load_tokenizer(cfg)
    stored_dtype = config.dtype
    model = from_config(
        config,
        dtype=torch.float32,
        attn_implementation=attention(cfg, config),
        trust_remote_code=cfg.trust_remote_code,
    )
    _ready(model, tokenizer, cfg, stored_dtype)
    return Loaded(model=model, tokenizer=tokenizer, notes=())


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every token that ends a completion: the tokenizer's, all of the generation config's, the chat template's."""
    ids = {tokenizer.eos_token_id, *turn_end(tokenizer)}
    listed = model.generation_config.eos_token_id
    ids.update(listed if isinstance(listed, list) else [listed])
    return frozenset(i for i in ids if i is not None)


def embedded_tokens(model: PreTrainedModel) -> int:
    """Tokens that the model has embeddings of: ids below this."""
    table: Any = model.get_input_embeddings()
    return int(table.weight.shape[0])


def _ready(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cfg: ModelConf, stored_dtype: torch.dtype | str | None
) -> None:
    # An export writes this dtype.
    model.config.dtype = stored_dtype
    # No dropout and no router noise: the trainer's and the sampler's distributions must be the same, and the ratio 1
    # before an update. So the model is in eval mode also while it is trained.
    model.eval()
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if cfg.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        # It acts in train mode only. The layer itself is put there, without the modules in it.
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.training = True
                for name in [name for name, value in vars(module).items() if "drop" in name and type(value) is float]:
                    setattr(module, name, 0.0)
                _no_dropout_from(model.config, module)


def _no_dropout_from(config: PreTrainedConfig, module: torch.nn.Module) -> None:
    """Raises UserError if `module`, in train mode, would read a dropout from the config, which an export writes."""
    source = inspect.getsource(type(module).forward)
    for name, value in vars(config).items():
        if "drop" in name and type(value) is float and value > 0 and f"config.{name}" in source:
            raise UserError(
                f"model.gradient_checkpointing=true switches on {name}={value} in {type(module).__name__}, and ratios "
                "would not start at 1: set it to 0 in config.json, or type model.gradient_checkpointing=false"
            )


def check_export(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: str) -> list[str]:
    """Save everything but the weights, so that an export cannot fail after all steps; what was mended, a note each.

    Raises UserError where config or tokenizer cannot be saved.
    """
    notes = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            model.generation_config.save_pretrained(folder)
        except ValueError:
            kept = {name: getattr(model.generation_config, name) for name in ("eos_token_id", "pad_token_id")}
            model.generation_config = GenerationConfig(**kept)
            notes.append("generation_config.json contradicts itself: only its token ids are kept")
        try:
            model.config.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"model.path={path} could not be exported again: {first_line(error)}") from error
    return notes
