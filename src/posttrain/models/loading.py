"""From `model.path` to a causal language model in fp32 and its tokenizer."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import logging as huggingface_logging
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import is_flash_attn_2_available
from transformers.utils import logging as transformers_logging

from posttrain.config import Architecture, Dtype, ModelConf
from posttrain.errors import UserError
from posttrain.models.internals import causal_model_class, registered, takes_flash_attention
from posttrain.models.tiny import EMBEDDED, tiny_config, tiny_tokenizer

# The model types of transformers that each named architecture accepts: the text model alone, or within the
# multimodal checkpoint (its text part is loaded).
MODEL_TYPES = {
    Architecture.qwen3_5_dense: {"qwen3_5", "qwen3_5_text"},
    Architecture.qwen3_5_moe: {"qwen3_5_moe", "qwen3_5_moe_text"},
    Architecture.qwen3_next: {"qwen3_next"},
    Architecture.qwen3_dense: {"qwen3"},
}


def weights_path(cfg: ModelConf) -> str:
    """What transformers loads from: the embedded model's directory where `model.path` is null."""
    return cfg.path if cfg.path is not None else str(EMBEDDED / cfg.architecture.value)


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


def load(cfg: ModelConf) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load fp32 weights (safetensors only) and the tokenizer, on the CPU.

    Raises:
        UserError: the path is no model, is of another architecture, or the hub cannot be reached.
    """
    # Each rank would show one, for a load that takes a moment.
    transformers_logging.disable_progress_bar()
    path = weights_path(cfg)
    config = load_config(cfg)
    stored_dtype = config.dtype
    source: dict[str, Any] = dict(revision=cfg.revision, trust_remote_code=cfg.trust_remote_code)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **source)
        # With output_loading_info it is a pair, whatever upstream's annotation says.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=torch.float32,
            attn_implementation=attention(cfg, config),
            use_safetensors=True,
            output_loading_info=True,
            **source,
        )
        model, found = loaded
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"model.path={path}: {_first_line(error)}") from error
    lacking = sorted(map(str, [*found["missing_keys"], *found["mismatched_keys"]]))
    # transformers would train them from random values, after a warning.
    if lacking:
        raise UserError(f"model.path={path} lacks {len(lacking)} weights of the model, such as {lacking[0]}")
    return _ready(model, tokenizer, cfg, stored_dtype)


def initialise(cfg: ModelConf) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """As `load`, but with random weights from torch's generator: of the embedded shape, or of `model.path`'s."""
    tokenizer: PreTrainedTokenizerBase
    if cfg.path is None:
        config, tokenizer = tiny_config(cfg.architecture.value), tiny_tokenizer()
    else:
        config = load_config(cfg)
        tokenizer = AutoTokenizer.from_pretrained(
            cfg.path, revision=cfg.revision, trust_remote_code=cfg.trust_remote_code
        )
    stored_dtype = config.dtype
    model = AutoModelForCausalLM.from_config(
        config,
        dtype=torch.float32,
        attn_implementation=attention(cfg, config),
        trust_remote_code=cfg.trust_remote_code,
    )
    return _ready(model, tokenizer, cfg, stored_dtype)


def load_config(cfg: ModelConf) -> PreTrainedConfig:
    """The checkpoint's text config, checked against `model.architecture`. Raises UserError."""
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
    try:
        config = AutoConfig.from_pretrained(
            path, revision=cfg.revision, trust_remote_code=cfg.trust_remote_code
        ).get_text_config(decoder=True)
    except (OSError, ValueError, KeyError) as error:
        hint = "Is the hub reachable, and the name right? A local directory also works."
        if "custom code" in str(error):
            hint = "Type model.trust_remote_code=true to run it."
        elif Path(path).is_dir():
            hint = "It needs config.json, *.safetensors and the tokenizer's files."
        raise UserError(f"model.path={path} could not be loaded: {_first_line(error)}. {hint}") from error
    accepted = MODEL_TYPES.get(cfg.architecture)
    if accepted and config.model_type not in accepted:
        fitting = [name.value for name, types in MODEL_TYPES.items() if config.model_type in types] or ["auto"]
        raise UserError(
            f"model.path={path} holds a {config.model_type!r} model, and model={cfg.architecture} takes "
            f"{' or '.join(sorted(accepted))}. Type model={fitting[0]} instead."
        )
    return config


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every token that ends a completion: the tokenizer's and all of the generation config's."""
    ids = {tokenizer.eos_token_id}
    listed = model.generation_config.eos_token_id
    ids.update(listed if isinstance(listed, list) else [listed])
    return frozenset(i for i in ids if i is not None)


def _ready(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cfg: ModelConf, stored_dtype: torch.dtype | str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
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
    return model, tokenizer


def _no_dropout_from(config: PreTrainedConfig, module: torch.nn.Module) -> None:
    """Raises UserError if `module`, in train mode, would read a dropout from the config, which an export writes."""
    source = inspect.getsource(type(module).forward)
    for name, value in vars(config).items():
        if "drop" in name and type(value) is float and value > 0 and f"config.{name}" in source:
            raise UserError(
                f"model.gradient_checkpointing=true switches on {name}={value} in {type(module).__name__}, and ratios "
                "would not start at 1: set it to 0 in config.json, or type model.gradient_checkpointing=false"
            )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
