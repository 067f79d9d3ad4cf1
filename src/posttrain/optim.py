"""AdamW on fp32 master weights, and the learning rate as a function of the step: nothing to save or restore."""

from __future__ import annotations

import math

import torch

from posttrain.config import OptimConf, Schedule


def make_optimizer(model: torch.nn.Module, cfg: OptimConf) -> torch.optim.AdamW:
    """AdamW; weight decay acts on matrices only, not on norms, biases and decay rates."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=cfg.lr, betas=tuple(cfg.betas))


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
