"""From composed values to a typed job, and what to type in place of a key that there is not. No torch, no Hydra."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from posttrain.config import RECIPES, JobConf
from posttrain.config.task import TASKS
from posttrain.errors import UserError

OF_OTHER_TRAINERS = {  # what is meant here: the names it has there
    "algorithm=<name>": "loss_type adv_estimator",
    "algorithm.advantage_scale": "scale_rewards",
    "algorithm.aggregation": "loss_agg_mode",
    "algorithm.clip_low and algorithm.clip_high": "epsilon clip_ratio",
    "algorithm.clip_low": "epsilon_low clip_ratio_low",
    "algorithm.clip_high": "epsilon_high clip_ratio_high",
    "algorithm.dual_clip": "clip_ratio_c",
    "algorithm.entropy_coefficient": "entropy_coeff",
    "algorithm.kl.coefficient": "beta kl_coef kl_loss_coef",
    "algorithm.updates_per_rollout": "num_iterations ppo_epochs",
    "rollout.group_size": "num_generations",
    "rollout.max_new_tokens": "max_completion_length max_response_length",
    "optim.lr": "learning_rate",
    "steps": "max_steps",
    "model.gradient_checkpointing": "gradient_checkpointing",
}
ELSEWHERE = {name: here for here, names in OF_OTHER_TRAINERS.items() for name in names.split()}
RENAMED = {"loss": "algorithm"}  # groups of version 0.1
RENAMED_KEYS = {"checkpoint.keep": "checkpoint.keep_last"}
OPEN = {"reward.weights"}  # whose keys are the user's


def typed(recipe: str, values: dict[str, Any]) -> JobConf:
    """The dataclasses of `values`, a plain dict without interpolations (a job.json).

    Refuses keys that the schema lacks: Hydra accepts `+optim.lrr=1`, this does not. Raises UserError with
    everything that is wrong in it, one line each.
    """
    schema = OmegaConf.structured(RECIPES[recipe])
    schema.task = OmegaConf.structured(TASKS[values["task"]["name"]])
    known = plain(schema)
    wrong = [no_such_key(key, known) for key in sorted(_leaves(values) - _leaves(known))]
    wrong += [f"{key}: deleted, but a job needs it" for key in sorted(_leaves(known) - _leaves(values))]
    if wrong:
        raise UserError("\n".join(wrong))
    try:
        job: Any = OmegaConf.to_object(OmegaConf.merge(schema, values))
        return job
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0]}") from error


def plain(config: Any, **how: Any) -> dict[str, Any]:
    """A config of groups as nested dicts; OmegaConf's own function may also return a list or a text."""
    values = OmegaConf.to_container(config, **how)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def changes(before: bytes, values: dict[str, Any]) -> list[str]:
    """`key=new instead of old` for each value of a job.json (empty: a new run) that `values` does not keep.

    Where a run resumes from is no such value.
    """
    groups = {RENAMED.get(group, group): value for group, value in json.loads(before or "{}").items()}
    old, new = _flat(groups), _flat(values)
    differing = [key for key in new if key in old and new[key] != old[key] and key != "resume"]
    return [f"{key}={json.dumps(new[key])} instead of {json.dumps(old[key])}" for key in differing]


def every_key(recipe: str) -> dict[str, Any]:
    """The schema as nested dicts, with the keys of every task."""
    schema = plain(OmegaConf.structured(RECIPES[recipe]))
    for task in TASKS.values():
        schema["task"] |= plain(OmegaConf.structured(task))
    return schema


def no_such_key(key: str, known: dict[str, Any]) -> str:
    """The message for a key that `known` (nested dicts) lacks: a guess, and what exists beside it."""
    first, dot, rest = key.partition(".")
    if first in RENAMED and first not in known:
        return f"{key} is now {RENAMED[first]}{dot}{rest}"
    group: list[str] = []
    for part in key.split("."):
        if not isinstance(known.get(part), dict):
            break
        group, known = [*group, part], known[part]
    if key in RENAMED_KEYS:
        return f"{key} is now {RENAMED_KEYS[key]}"
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
    flat = _flat(tree)
    return {next((key for key in OPEN if leaf.startswith(f"{key}.")), leaf) for leaf in flat}
