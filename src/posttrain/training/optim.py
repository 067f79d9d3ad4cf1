"""AdamW on fp32 master weights, its guarded step, and the learning rate as a function of the step."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from posttrain.config import OptimConf, Schedule
from posttrain.training.fsdp import on_any_rank


def make_optimizer(model: nn.Module, cfg: OptimConf) -> torch.optim.AdamW:
    """AdamW; weight decay acts on matrices only, experts' matrices included.

    It leaves alone norms, biases, decay rates, and the taps of convolutions, which have three dimensions but are no
    matrices. `model` is not sharded yet.
    """
    taps = {id(m.weight) for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)}
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            matrix = parameter.ndim >= 2 and id(parameter) not in taps
            (decayed if matrix else others).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": cfg.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    first, second = cfg.betas
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=cfg.lr, betas=(first, second))


def learning_rate(cfg: OptimConf, step: int, steps: int) -> float:
    """The rate of step `step` (from 0) of `steps`: linear warmup, then constant, or down to 0 (linear or cosine)."""
    warmup = min(1.0, (step + 1) / cfg.warmup_steps) if cfg.warmup_steps else 1.0
    done = max(0.0, step - cfg.warmup_steps) / max(1, steps - cfg.warmup_steps)
    match cfg.schedule:
        case Schedule.constant:
            decay = 1.0
        case Schedule.linear:
            decay = 1.0 - done
        case Schedule.cosine:
            decay = 0.5 * (1.0 + math.cos(math.pi * done))
    return cfg.lr * warmup * decay


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: torch.Tensor,
    cfg: OptimConf,
) -> float | None:
    """Clip the gradients and take an optimizer step on all ranks; returns the norm before clipping, over all ranks.

    Where `loss`, this rank's part, or the norm is not finite on some rank, no rank takes the step: None. Weights and
    optimizer state are then as before; clipping alone would turn one NaN into a model of NaNs.
    """
    norm = float(accelerator.clip_grad_norm_(model.parameters(), cfg.max_grad_norm))
    finite = not on_any_rank(not math.isfinite(norm) or not loss.isfinite())
    if finite:
        optimizer.step()
    optimizer.zero_grad()
    return norm if finite else None


def say_skipped(step: int, in_a_row: int, prompts: Collection[int], cfg: OptimConf) -> None:
    """Warn of an update that was left out; raises FloatingPointError if `cfg.max_skipped` of them came in a row.

    `prompts`: indices, in the training split, of those whose loss was not finite; empty: only the gradient was not.
    """
    named = f"the loss of prompts {sorted(set(prompts))}" if prompts else "the gradient"
    found = f"step {step}: {named} is not finite, update skipped on all ranks"
    if in_a_row >= cfg.max_skipped:
        raise FloatingPointError(f"{found}, {in_a_row} in a row (optim.max_skipped={cfg.max_skipped})")
    logging.getLogger(__name__).warning(found)
