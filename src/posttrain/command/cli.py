"""The command line: Hydra composes and sweeps, this checks, makes the run directory and starts the ranks.

This file, explain.py and run_directory.py know Hydra. None imports torch: `--help`, `--cfg job` and tab completion are
instant.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, Node, OmegaConf

from posttrain.command import launch, rank
from posttrain.command.explain import complain, help_text
from posttrain.command.order import without_secrets
from posttrain.command.output import make_best_effort
from posttrain.command.renamed import renamed
from posttrain.command.run_directory import claim
from posttrain.command.shorthand import spelled_out
from posttrain.config import RECIPES, JobConf, PreflightConf
from posttrain.config.algorithm_rules import idle
from posttrain.config.rules import problems
from posttrain.config.task import TASKS
from posttrain.config.validation import plain, typed
from posttrain.errors import UserError


class JobFailed(Exception):
    """A job did not end well, and has said why. Its exit status; Hydra goes on with the rest of a sweep."""


def main(recipe_file: str) -> NoReturn:
    """Run the recipe as the command line says, and exit: 0, 1 failed, 2 a user's mistake, 130 interrupted.

    Called by a recipe before its heavy imports; the ranks import the recipe and call its train(cfg, run_dir).
    """
    make_best_effort()
    recipe = Path(recipe_file).resolve()
    # Hydra's parser takes `-m fsdp=...` but not `steps=3 -m fsdp=...`.
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda argument: argument not in ("-m", "--multirun"))
    if rank.started_elsewhere():
        rank.join(recipe, lambda: _order(recipe))
    sys.exit(_read_command_line(recipe, lambda cfg: _launch(recipe, cfg)))


def _read_command_line(recipe: Path, run_job: Callable[[DictConfig], int]) -> int:
    """Let Hydra call `run_job` for every job; the exit status, after saying why it is not 0."""
    conf = recipe.parents[1] / "conf"
    try:
        sys.argv[1:] = renamed(
            spelled_out(sys.argv[1:]), {each.name for each in dataclasses.fields(RECIPES[recipe.stem])}
        )
    except UserError as error:
        return complain(error, recipe.stem, debug=False)
    if recipe.stem == "preflight":
        # Programs ask for JSON in this way everywhere.
        sys.argv[1:] = ["json=true" if argument == "--json" else argument for argument in sys.argv[1:]]
    if {"-h", "--help"} & set(sys.argv):
        print(help_text(recipe.stem, conf))
        return 0
    # Hydra then hands its exceptions over instead of printing them.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    debug = "debug=true" in map(str.lower, sys.argv)
    statuses: list[int] = []
    parent = os.getpid()

    def job(cfg: DictConfig) -> None:
        # The process of a parallel launcher has not declared them yet.
        _declare(recipe.stem)
        try:
            status = run_job(cfg)
        except Exception as error:
            with contextlib.suppress(OSError):
                # Hydra made the directory, and it is empty.
                os.rmdir(HydraConfig.get().runtime.output_dir)
            status = complain(error, recipe.stem, debug)
        statuses.append(status)
        if status > 2:
            # An interrupted sweep starts no further jobs.
            sys.exit(status)
        if status and os.getpid() != parent:
            # An exception is the only way back from a parallel launcher's process.
            raise JobFailed(status)

    try:
        _declare(recipe.stem)
        hydra.main(config_path=str(conf), config_name=recipe.stem, version_base="1.3")(job)()
    except JobFailed as elsewhere:
        return elsewhere.args[0]
    except KeyboardInterrupt:
        return 130
    except launch.Interrupted as stop:  # while the ranks of a failed job were being ended
        return 128 + stop.signum
    except Exception as error:
        return complain(error, recipe.stem, debug)
    failed = sum(status > 0 for status in statuses)
    if failed and len(statuses) > 1:
        print(f"{failed} of {len(statuses)} jobs did not end well", file=sys.stderr)
    # --cfg, --info and tab completion run no job: there is no status then.
    return 1 if 1 in statuses else max(statuses, default=0)


def _declare(recipe: str) -> None:
    """Tell Hydra the schemas that the lists in conf/ name, and the resolver that values there use."""
    store = ConfigStore.instance()
    store.store(f"{recipe}_schema", RECIPES[recipe])
    for name, schema in TASKS.items():
        store.store(f"{name}_task", schema)
    OmegaConf.register_new_resolver("when_embedded", _when_embedded, replace=True)


def _when_embedded(path: str | None, tiny: Any, *real: Any, _parent_: DictConfig, _node_: Node) -> Any:
    """${when_embedded:${model.path},TINY}: TINY for the embedded model, else the schema's default; or a third value."""
    if path is None:
        return tiny
    return real[0] if real else OmegaConf.structured(OmegaConf.get_type(_parent_))[_node_._key()]


def _launch(recipe: Path, cfg: DictConfig) -> int:
    """One job of this command line, on ranks of its own; their exit status."""
    gpus = launch.visible_gpus()
    nproc = cfg.launch.nproc if isinstance(cfg.launch.nproc, int) else gpus or 1
    job, values = _checked(recipe.stem, cfg, nproc)
    if isinstance(job, PreflightConf):
        # It looks at a job of any number of ranks, and is itself one.
        nproc = 1
    if 0 < gpus < nproc:
        raise UserError(
            f"launch.nproc={nproc}: this machine shows {gpus} GPU{'s' * (gpus > 1)}; type launch.nproc=auto, "
            "or put CUDA_VISIBLE_DEVICES= in front to use the CPU"
        )
    run_dir, lock = claim(cfg, without_secrets(cfg, values))
    try:
        return launch.start_ranks(recipe, run_dir, job, nproc)
    finally:
        os.close(lock)


def _order(recipe: Path) -> dict[str, Any]:
    """What rank 0 tells the ranks of an external launcher, see rank.join."""
    order: dict[str, Any] = {"exit": 2, "job": None, "run_dir": None}
    sweep = "a sweep starts its own ranks: start it with python, without torchrun, accelerate launch or srun"

    def take(cfg: DictConfig) -> int:
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            raise UserError(sweep)
        local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if cfg.launch.nproc not in ("auto", local):
            print(f"launch.nproc={cfg.launch.nproc} is ignored: {local} started already", file=sys.stderr)
        _, values = _checked(recipe.stem, cfg, int(os.environ["WORLD_SIZE"]))
        # The lock lasts as long as this process.
        run_dir, _ = claim(cfg, without_secrets(cfg, values))
        order.update(job=values, run_dir=str(run_dir))
        return 0

    if {"-m", "--multirun"} & set(sys.argv):
        print(sweep, file=sys.stderr)
        return order
    try:
        order["exit"] = _read_command_line(recipe, take)
    except SystemExit as end:  # --help, or an unknown flag
        order["exit"] = end.code or 0
    # This process goes on as a rank, and libraries would write to Hydra's handlers.
    logging.getLogger().handlers.clear()
    logging.getLogger().setLevel(logging.WARNING)
    return order


def _checked(recipe: str, cfg: DictConfig, world: int) -> tuple[JobConf, dict[str, Any]]:
    """The typed job and its plain values, paths made absolute. Raises UserError with every error at once."""
    if OmegaConf.get_type(cfg.task) is not TASKS[cfg.task.name]:
        raise UserError(f"task.name={cfg.task.name} does not change the task: type task={cfg.task.name}")
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise UserError("\n".join(f"{key} needs a value: type {key}=..." for key in missing))
    values = plain(cfg, resolve=True, enum_to_str=True)
    for group, key in (("model", "path"), ("task", "path"), ("task", "eval_path")):
        if key in values[group]:
            values[group][key] = _absolute(values[group][key])
    values["reward"]["python"] = _absolute_places(values["reward"]["python"])
    values["reward"]["schema"] = _absolute(values["reward"]["schema"])
    if values.get("resume", "auto") != "auto":
        values["resume"] = _absolute(values["resume"])
    job = typed(recipe, values)
    wrong = problems(job, world)
    if wrong:
        raise UserError("\n".join(wrong))
    for note in idle(job):
        print(f"note: {note}", file=sys.stderr)
    return job, values


def _absolute_places(places: Any) -> Any:
    """Of path/to/file.py:function, or of each in a list, the path as `_absolute` has it."""
    if isinstance(places, list):
        return [_absolute_places(each) for each in places]
    if not isinstance(places, str):
        return places
    file, colon, function = places.rpartition(":")
    return f"{_absolute(file)}{colon}{function}"


def _absolute(path: Any) -> Any:
    """A path that exists, seen from where the user typed it; anything else (a hub name) as it is. Of a list, each."""
    if isinstance(path, list):
        return [_absolute(each) for each in path]
    if not isinstance(path, str) or not path:
        return path
    local = Path(HydraConfig.get().runtime.cwd, os.path.expanduser(path))
    return str(local) if local.exists() or glob.glob(str(local), recursive=True) else path
