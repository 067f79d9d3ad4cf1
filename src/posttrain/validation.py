"""From composed values to a typed job, and the checks that span several fields. No torch, no Hydra."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from posttrain.config import (
    RECIPES,
    TASKS,
    Architecture,
    ArithmeticConf,
    FileConf,
    GRPOConf,
    JobConf,
    SFTConf,
    Strategy,
    hybrid_shard_size,
)
from posttrain.errors import UserError


def typed(recipe: str, values: dict[str, Any]) -> JobConf:
    """The dataclasses of `values`, a plain dict without interpolations (a job.json).

    Refuses keys that the schema lacks: Hydra accepts `+optim.lrr=1`, this does not. Raises UserError with
    everything that is wrong in it, one line each.
    """
    schema = OmegaConf.structured(RECIPES[recipe])
    schema.task = OmegaConf.structured(TASKS[values["task"]["name"]])
    known = OmegaConf.to_container(schema)
    wrong = [no_such_key(key, known) for key in sorted(_leaves(values) - _leaves(known))]
    wrong += [f"{key}: deleted, but a job needs it" for key in sorted(_leaves(known) - _leaves(values))]
    if wrong:
        raise UserError("\n".join(wrong))
    try:
        return OmegaConf.to_object(OmegaConf.merge(schema, values))
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0]}") from error


def changes(before: bytes, values: dict[str, Any]) -> list[str]:
    """`key=new instead of old` for each value of a job.json (empty: a new run) that `values` does not keep."""
    old, new = _flat(json.loads(before or "{}")), _flat(values)
    return [f"{key}={new[key]} instead of {old[key]}" for key in new if key in old and new[key] != old[key]]


def every_key(recipe: str) -> dict[str, Any]:
    """The schema as nested dicts, with the keys of every task."""
    schema = OmegaConf.to_container(OmegaConf.structured(RECIPES[recipe]))
    for task in TASKS.values():
        schema["task"] |= OmegaConf.to_container(OmegaConf.structured(task))
    return schema


def no_such_key(key: str, known: dict[str, Any]) -> str:
    """The message for a key that `known` (nested dicts) lacks: a guess, and what exists beside it."""
    group: list[str] = []
    for part in key.split("."):
        if not isinstance(known.get(part), dict):
            break
        group, known = [*group, part], known[part]
    path = ".".join(group)
    rest = key.removeprefix(path).lstrip(".")
    guess = did_you_mean(rest, _leaves(known) | set(known), prefix=f"{path}." if path else "")
    return f"{key}: no such key{guess} {path or 'There'} {'has' if path else 'are'}: {', '.join(known)}"


def did_you_mean(name: str, names: Iterable[str], prefix: str = "") -> str:
    """`; did you mean <the closest of names>?`, or a full stop when none is close."""
    names = list(names)
    short = {option.rpartition(".")[2]: option for option in reversed(names)}
    close = difflib.get_close_matches(name, names, 1) or [
        short[leaf] for leaf in difflib.get_close_matches(name.rpartition(".")[2], short, 1)
    ]
    return f"; did you mean {prefix}{close[0]}?" if close else "."


def problems(cfg: JobConf, world: int) -> list[str]:
    """What is wrong with a job for `world` ranks, every error at once, each with what to type instead."""
    rules = [*_common(cfg), *(_training(cfg, world) if isinstance(cfg, GRPOConf | SFTConf) else [])]
    if isinstance(cfg, GRPOConf):
        rules += _grpo(cfg)
    if cfg.model.architecture is Architecture.auto and cfg.model.path is None:
        rules.append((False, "model=auto needs weights: type model.path=<hub name or directory>"))
    return [message for holds, message in rules if not holds]


def _common(cfg: JobConf) -> list[tuple[bool, str]]:
    rollout, task, evaluation, launch = cfg.rollout, cfg.task, cfg.evaluation, cfg.launch
    return [
        (0 < rollout.top_p <= 1, f"rollout.top_p={rollout.top_p}: must be above 0 and at most 1"),
        _least("rollout.max_new_tokens", rollout.max_new_tokens, 1),
        _least("rollout.batch_size", rollout.batch_size, 1),
        _least("task.max_prompt_tokens", task.max_prompt_tokens, 1),
        _least("evaluation.prompts", evaluation.prompts, 0 if isinstance(cfg, GRPOConf | SFTConf) else 1),
        (0 <= cfg.seed < 2**63, f"seed={cfg.seed}: must be at least 0 and below 2^63"),
        *([_least("task.heldout", task.heldout, 0)] if isinstance(task, ArithmeticConf | FileConf) else []),
        *([_least("task.largest", task.largest, 1)] if isinstance(task, ArithmeticConf) else []),
        _least("evaluation.temperature", evaluation.temperature, 0),
        (
            min(task.reward_correct, task.reward_format) >= 0 and task.reward_correct + task.reward_format > 0,
            f"task.reward_correct={task.reward_correct} task.reward_format={task.reward_format}: "
            "weights must be 0 or more, and not both 0",
        ),
        _auto_or_count("launch.nproc", launch.nproc),
        _auto_or_count("launch.threads", launch.threads),
        (launch.timeout_s > 0, f"launch.timeout_s={launch.timeout_s}: must be above 0"),
    ]


def _training(cfg: GRPOConf | SFTConf, world: int) -> list[tuple[bool, str]]:
    betas, budget, pad = cfg.optim.betas, cfg.packing.tokens_per_row, cfg.packing.pad_multiple
    return [
        _least("evaluation.every", cfg.evaluation.every, 0),
        _least("steps", cfg.steps, 1),
        (cfg.optim.lr > 0, f"optim.lr={cfg.optim.lr}: must be above 0"),
        (
            len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
            f"optim.betas={betas}: must be two numbers, each at least 0 and below 1",
        ),
        _least("optim.weight_decay", cfg.optim.weight_decay, 0),
        (cfg.optim.max_grad_norm > 0, f"optim.max_grad_norm={cfg.optim.max_grad_norm}: must be above 0"),
        _least("optim.warmup_steps", cfg.optim.warmup_steps, 0),
        _least("packing.tokens_per_row", budget, 1),
        _least("packing.pad_multiple", pad, 1),
        (
            pad < 1 or budget % pad == 0,
            f"packing.tokens_per_row={budget} is no multiple of packing.pad_multiple={pad}: rows would be padded past "
            f"the budget; type packing.tokens_per_row={max(budget // max(pad, 1), 1) * pad}",
        ),
        _hybrid(cfg, world),
        *([_least("batch_size", cfg.batch_size, 1)] if isinstance(cfg, SFTConf) else []),
    ]


def _grpo(cfg: GRPOConf) -> list[tuple[bool, str]]:
    loss, peak = cfg.loss, cfg.metrics.peak_tflops
    return [
        (cfg.rollout.temperature > 0, f"rollout.temperature={cfg.rollout.temperature}: must be above 0"),
        (
            cfg.rollout.group_size >= 2,
            f"rollout.group_size={cfg.rollout.group_size}: GRPO compares completions of one prompt, it needs 2 or more",
        ),
        _least("prompts_per_step", cfg.prompts_per_step, 1),
        (0 < loss.clip_low < 1, f"loss.clip_low={loss.clip_low}: must be above 0 and below 1"),
        (loss.clip_high > 0, f"loss.clip_high={loss.clip_high}: must be above 0"),
        _least("loss.updates_per_rollout", loss.updates_per_rollout, 1),
        _least("checkpoint.every", cfg.checkpoint.every, 0),
        _least("checkpoint.keep", cfg.checkpoint.keep, 0),
        (peak is None or peak > 0, f"metrics.peak_tflops={peak}: must be above 0, or null"),
    ]


def _least(key: str, value: float, least: int) -> tuple[bool, str]:
    return value >= least, f"{key}={value}: must be {least} or more"


def _auto_or_count(key: str, value: int | str) -> tuple[bool, str]:
    holds = value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)
    return holds, f"{key}={value}: must be auto, or a whole number from 1"


def _hybrid(cfg: GRPOConf | SFTConf, world: int) -> tuple[bool, str]:
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


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat


def _leaves(tree: dict[str, Any]) -> set[str]:
    """Dotted keys of the leaves of nested dicts."""
    return set(_flat(tree))
