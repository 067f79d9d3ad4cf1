"""From composed values to a typed job, and what to type in place of a key that there is not. No torch, no Hydra."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from posttrain.config import RECIPES, TASKS, JobConf
from posttrain.errors import UserError

ELSEWHERE = {  # names of other trainers
    "beta": "algorithm.kl.coefficient", "kl_coef": "algorithm.kl.coefficient", "kl_loss_coef": "algorithm.kl.coefficient",
    "epsilon": "algorithm.clip_low and algorithm.clip_high", "clip_ratio": "algorithm.clip_low and algorithm.clip_high",
    "epsilon_low": "algorithm.clip_low", "epsilon_high": "algorithm.clip_high", "clip_ratio_low": "algorithm.clip_low",
    "clip_ratio_high": "algorithm.clip_high", "clip_ratio_c": "algorithm.dual_clip", "entropy_coeff": "algorithm.entropy_coefficient",
    "loss_type": "algorithm=<name>", "adv_estimator": "algorithm=<name>", "loss_agg_mode": "algorithm.aggregation",
    "scale_rewards": "algorithm.advantage_scale", "num_iterations": "algorithm.updates_per_rollout",
    "ppo_epochs": "algorithm.updates_per_rollout", "num_generations": "rollout.group_size",
    "max_completion_length": "rollout.max_new_tokens", "max_response_length": "rollout.max_new_tokens",
    "learning_rate": "optim.lr", "max_steps": "steps", "gradient_checkpointing": "model.gradient_checkpointing",
}  # fmt: skip


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
    if known_as := ELSEWHERE.get(key.rpartition(".")[2]):
        return f"{key}: no such key; here it is {known_as}"
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


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat


def _leaves(tree: dict[str, Any]) -> set[str]:
    """Dotted keys of the leaves of nested dicts."""
    return set(_flat(tree))
