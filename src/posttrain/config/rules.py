"""The checks that span several fields, or that a type does not tell. No torch, no Hydra."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from posttrain.config import Architecture, GRPOConf, JobConf, SFTConf, Strategy, TrainingConf, hybrid_shard_size
from posttrain.config.algorithm import Baseline
from posttrain.config.algorithm_rules import algorithm_rules, least, surrogate_rules
from posttrain.config.reward_rules import reward_rules
from posttrain.config.task import ArithmeticConf, TableConf


def problems(cfg: JobConf, world: int) -> list[str]:
    """What is wrong with a job for `world` ranks, every error at once, each with what to type instead."""
    values = {key: value for key, value in _values(cfg) if isinstance(value, float)}
    values.pop("optim.max_grad_norm", None)  # infinite: no clipping
    endless = [f"{key}={value}: must be a finite number" for key, value in values.items() if not math.isfinite(value)]
    if endless:  # what follows compares numbers
        return endless
    rules = [*_common(cfg), *(_training(cfg, world) if isinstance(cfg, TrainingConf) else [])]
    if isinstance(cfg, GRPOConf):
        rules += [*_grpo(cfg), *surrogate_rules(cfg.algorithm), *algorithm_rules(cfg)]
    if cfg.model.architecture is Architecture.auto and cfg.model.path is None:
        rules.append((False, "model=auto needs weights: type model.path=<hub name or directory>"))
    return [message for holds, message in rules if not holds]


def _values(conf: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each value of nested dataclasses with its dotted key."""
    for each in dataclasses.fields(conf):
        value = getattr(conf, each.name)
        if dataclasses.is_dataclass(value):
            yield from _values(value, f"{prefix}{each.name}.")
        else:
            yield f"{prefix}{each.name}", value


def _common(cfg: JobConf) -> list[tuple[bool, str]]:
    rollout, task, evaluation, launch = cfg.rollout, cfg.task, cfg.evaluation, cfg.launch
    return [
        (0 < rollout.top_p <= 1, f"rollout.top_p={rollout.top_p}: must be above 0 and at most 1"),
        least("rollout.max_new_tokens", rollout.max_new_tokens, 1),
        least("rollout.batch_size", rollout.batch_size, 1),
        least("task.max_prompt_tokens", task.max_prompt_tokens, 1),
        least("evaluation.prompts", evaluation.prompts, 0 if isinstance(cfg, TrainingConf) else 1),
        (0 <= cfg.seed < 2**63, f"seed={cfg.seed}: must be at least 0 and below 2^63"),
        *([least("task.heldout", task.heldout, 0)] if isinstance(task, ArithmeticConf | TableConf) else []),
        *([least("task.largest", task.largest, 1)] if isinstance(task, ArithmeticConf) else []),
        least("evaluation.temperature", evaluation.temperature, 0),
        least("evaluation.samples", evaluation.samples, 1),
        (
            evaluation.samples <= 1 or evaluation.temperature > 0,
            f"evaluation.samples={evaluation.samples} evaluation.temperature=0: greedy samples are all equal; type "
            "evaluation.temperature=1 as well, or another above 0",
        ),
        (
            min(task.reward_correct, task.reward_format) >= 0 and task.reward_correct + task.reward_format > 0,
            f"task.reward_correct={task.reward_correct} task.reward_format={task.reward_format}: "
            "weights must be 0 or more, and not both 0",
        ),
        _auto_or_count("launch.nproc", launch.nproc),
        _auto_or_count("launch.threads", launch.threads),
        (launch.timeout_s > 0, f"launch.timeout_s={launch.timeout_s}: must be above 0"),
        least("launch.grace_s", launch.grace_s, 0),
        *reward_rules(cfg),
    ]


def _training(cfg: TrainingConf, world: int) -> list[tuple[bool, str]]:
    betas, budget, pad = cfg.optim.betas, cfg.packing.tokens_per_row, cfg.packing.pad_multiple
    peak = cfg.metrics.peak_tflops
    return [
        least("evaluation.every", cfg.evaluation.every, 0),
        least("evaluation.patience", cfg.evaluation.patience, 0),
        (
            cfg.evaluation.patience <= 0 or min(cfg.evaluation.every, cfg.evaluation.prompts) > 0,
            f"evaluation.patience={cfg.evaluation.patience} counts evaluations: type evaluation.every=10 as well, and "
            "at least evaluation.prompts=1",
        ),
        least("steps", cfg.steps, 1),
        (cfg.optim.lr > 0, f"optim.lr={cfg.optim.lr}: must be above 0"),
        (
            len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
            f"optim.betas={betas}: must be two numbers, each at least 0 and below 1",
        ),
        least("optim.weight_decay", cfg.optim.weight_decay, 0),
        (cfg.optim.max_grad_norm > 0, f"optim.max_grad_norm={cfg.optim.max_grad_norm}: must be above 0"),
        least("optim.warmup_steps", cfg.optim.warmup_steps, 0),
        least("optim.max_skipped", cfg.optim.max_skipped, 1),
        least("packing.tokens_per_row", budget, 1),
        least("packing.pad_multiple", pad, 1),
        (
            pad < 1 or budget % pad == 0,
            f"packing.tokens_per_row={budget} is no multiple of packing.pad_multiple={pad}: rows would be padded past "
            f"the budget; type packing.tokens_per_row={max(budget // max(pad, 1), 1) * pad}",
        ),
        least("checkpoint.every", cfg.checkpoint.every, 0),
        least("checkpoint.keep_last", cfg.checkpoint.keep_last, 0),
        least("checkpoint.keep_every", cfg.checkpoint.keep_every, 0),
        *_kept(cfg),
        (peak is None or peak > 0, f"metrics.peak_tflops={peak}: must be above 0, or null"),
        _hybrid(cfg, world),
        *(_sft(cfg) if isinstance(cfg, SFTConf) else []),
    ]


def _kept(cfg: TrainingConf) -> list[tuple[bool, str]]:
    """checkpoint.keep_every and checkpoint.best pick among the checkpoints that there are."""
    every, kept, judged = cfg.checkpoint.every, cfg.checkpoint.keep_every, cfg.evaluation.every
    return [
        (
            kept <= 0 or (every > 0 and kept % every == 0),
            f"checkpoint.keep_every={kept} is no multiple of checkpoint.every={every}: there would be no checkpoint",
        ),
        (
            not cfg.checkpoint.best or (min(every, judged, cfg.evaluation.prompts) > 0 and every % judged == 0),
            f"checkpoint.best={str(cfg.checkpoint.best).lower()} compares the evaluations of checkpoints: type "
            f"evaluation.every={every if every > 0 else 100} as well, or another divisor of checkpoint.every={every}, "
            "and at least evaluation.prompts=1",
        ),
    ]


def _grpo(cfg: GRPOConf) -> list[tuple[bool, str]]:
    algorithm, alone = cfg.algorithm, cfg.algorithm.advantage_baseline is Baseline.batch
    return [
        (cfg.rollout.temperature > 0, f"rollout.temperature={cfg.rollout.temperature}: must be above 0"),
        least("rollout.group_size", cfg.rollout.group_size, 1),
        (
            cfg.rollout.group_size != 1 or alone,
            "rollout.group_size=1: GRPO compares completions of one prompt, it needs 2 or more; "
            "or type algorithm.advantage_baseline=batch algorithm.advantage_scale=batch_tokens",
        ),
        least("prompts_per_step", cfg.prompts_per_step, 1),
        (
            not alone or cfg.rollout.group_size * cfg.prompts_per_step != 1,
            "rollout.group_size=1 prompts_per_step=1: one completion a step has nothing to be compared with",
        ),
        least("algorithm.updates_per_rollout", algorithm.updates_per_rollout, 1),
        least("algorithm.mini_batches", algorithm.mini_batches, 1),
        (
            algorithm.mini_batches <= max(cfg.prompts_per_step, 1),
            f"algorithm.mini_batches={algorithm.mini_batches}: each needs a prompt, and there are "
            f"prompts_per_step={cfg.prompts_per_step}",
        ),
        least("rollout.max_staleness", cfg.rollout.max_staleness, 0),
        least("metrics.full_every", cfg.metrics.full_every, 0),
    ]


def _sft(cfg: SFTConf) -> list[tuple[bool, str]]:
    return [
        least("batch_size", cfg.batch_size, 1),
        (
            cfg.stop_at is None or (cfg.evaluation.every > 0 and cfg.evaluation.prompts > 0),
            f"stop_at={cfg.stop_at} is compared with each evaluation: type evaluation.every=10 as well, and at least "
            "evaluation.prompts=1",
        ),
        (
            cfg.stop_at is None or 0 <= cfg.stop_at <= 1,
            f"stop_at={cfg.stop_at} is a share of right answers, from 0 to 1: type stop_at=0.9, for example",
        ),
    ]


def _auto_or_count(key: str, value: int | str) -> tuple[bool, str]:
    holds = value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)
    return holds, f"{key}={value}: must be auto, or a whole number from 1"


def _hybrid(cfg: TrainingConf, world: int) -> tuple[bool, str]:
    """shard_size under another strategy is ignored, so that a sweep over strategies can set it once."""
    if cfg.fsdp.strategy is not Strategy.hybrid_shard:
        return True, ""
    size, given = hybrid_shard_size(cfg.fsdp, world), cfg.fsdp.shard_size
    possible = [k for k in range(2, world // 2 + 1) if world % k == 0]
    advice = (
        f"type fsdp.shard_size={' or '.join(map(str, possible))}"
        if possible
        else "type launch.nproc=4 or another product, or fsdp=full_shard"
    )
    return size in possible, (
        f"fsdp=hybrid_shard needs 2 or more groups of 2 or more ranks, and {world} rank{'s' * (world > 1)} "
        f"cannot be cut into {f'groups of {given}' if given else 'such groups'}: {advice}"
    )
