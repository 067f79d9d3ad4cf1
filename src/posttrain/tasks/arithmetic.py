"""Sums of two numbers, made on the fly."""

from __future__ import annotations

import random

from posttrain.config.task import ArithmeticConf
from posttrain.errors import UserError
from posttrain.tasks.task import Data, Row


def arithmetic(cfg: ArithmeticConf) -> Data:
    """`a+b=` for every pair of operands up to `largest`; the held-out pairs are never trained on."""
    operands = range(cfg.largest + 1)
    rows = [Row(f"{a}+{b}=", str(a + b)) for a in operands for b in operands]
    random.Random(cfg.seed).shuffle(rows)
    if cfg.heldout >= len(rows):
        raise UserError(f"task.heldout={cfg.heldout} leaves no training problem of {len(rows)}; lower it")
    scorers = {"correct": "exact", "format": "integer_format"}
    return Data(rows[cfg.heldout :], rows[: cfg.heldout], scorers)
