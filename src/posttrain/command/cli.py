"""The command line: Hydra composes and sweeps, this checks, makes the run directory and starts the ranks.

This and explain.py know Hydra, and import no torch: `--help`, `--cfg job` and tab completion are instant.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import logging
import os
import re
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
from posttrain.command.renamed import renamed
from posttrain.config import RECIPES, TASKS, JobConf
from posttrain.config.algorithm_rules import idle
from posttrain.config.rules import problems
from posttrain.config.validation import changes, plain, typed
from posttrain.errors import UserError

NAME_LENGTH = 120  # of a sweep job's directory; file systems allow 255


class JobFailed(Exception):
    """A job did not end well, and has said why. Its exit status; Hydra goes on with the rest of a sweep."""


def main(recipe_file: str) -> NoReturn:
    """Run the recipe as the command line says, and exit: 0, 1 failed, 2 a user's mistake, 130 interrupted.

    Called by a recipe before its heavy imports; the ranks import the recipe and call its train(cfg, run_dir).
    """
    recipe = Path(recipe_file).resolve()
    # Hydra's parser takes `-m fsdp=...` but not `steps=3 -m fsdp=...`.
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda argument: argument not in ("-m", "--multirun"))
    if rank.started_elsewhere():
        rank.join(recipe, lambda: _order(recipe))
    sys.exit(_read_command_line(recipe, lambda cfg: _launch(recipe, cfg)))


def _read_command_line(recipe: Path, run_job: Callable[[DictConfig], int]) -> int:
    """Let Hydra call `run_job` for every job; the exit status, after saying why it is not 0."""
    conf = recipe.parents[1] / "conf"
    sys.argv[1:] = renamed(sys.argv[1:])
    if {"-h", "--help"} & set(sys.argv):
        print(help_text(recipe.stem, conf))
        return 0
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its exceptions over instead of printing them
    debug = "debug=true" in map(str.lower, sys.argv)
    statuses: list[int] = []
    parent = os.getpid()

    def job(cfg: DictConfig) -> None:
        _declare(recipe.stem)  # also in the process of a parallel launcher
        try:
            status = run_job(cfg)
        except Exception as error:
            with contextlib.suppress(OSError):
                os.rmdir(HydraConfig.get().runtime.output_dir)  # Hydra made it, it is empty
            status = complain(error, recipe.stem, debug)
        statuses.append(status)
        if status > 2:
            sys.exit(status)  # interrupted: no further jobs
        if status and os.getpid() != parent:
            raise JobFailed(status)  # the only way back from a parallel launcher's process

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
    return 1 if 1 in statuses else max(statuses, default=0)  # --cfg, --info and tab completion run no job


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
    if 0 < gpus < nproc:
        raise UserError(
            f"launch.nproc={nproc}: this machine shows {gpus} GPU{'s' * (gpus > 1)}; type launch.nproc=auto, "
            "or put CUDA_VISIBLE_DEVICES= in front to use the CPU"
        )
    run_dir, lock = _claim(cfg, values)
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
        run_dir, _ = _claim(cfg, values)  # its lock lasts as long as this process
        order.update(job=values, run_dir=str(run_dir))
        return 0

    if {"-m", "--multirun"} & set(sys.argv):
        print(sweep, file=sys.stderr)
        return order
    try:
        order["exit"] = _read_command_line(recipe, take)
    except SystemExit as end:  # --help, or an unknown flag
        order["exit"] = end.code or 0
    logging.getLogger().handlers.clear()  # Hydra's: this process goes on as a rank, and libraries would write there
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
    if values.get("resume", "auto") != "auto":
        values["resume"] = _absolute(values["resume"])
    job = typed(recipe, values)
    wrong = problems(job, world)
    if wrong:
        raise UserError("\n".join(wrong))
    for note in idle(job):
        print(f"note: {note}", file=sys.stderr)
    return job, values


def _absolute(path: str | None) -> str | None:
    """A path that exists, seen from where the user typed it; anything else (a hub name) as it is."""
    local = Path(HydraConfig.get().runtime.cwd, os.path.expanduser(path or ""))
    return str(local) if path and local.exists() else path


def _claim(cfg: DictConfig, values: dict[str, Any]) -> tuple[Path, int]:
    """This job's run directory, holding config.yaml (interpolations unresolved) and job.json (resolved).

    Also returns a locked file descriptor: while it is open no other run takes the directory, not even with
    resume=auto. Whoever creates job.json owns a new directory.
    """
    hydra_cfg = HydraConfig.get()
    mine = ("hydra.run.dir=", "hydra.sweep.dir=", "hydra.sweep.subdir=")
    chosen = any(override.startswith(mine) for override in hydra_cfg.overrides.hydra)
    resume = values.get("resume") == "auto"
    if resume and not chosen:
        raise UserError("resume=auto goes on with the run in a directory: type hydra.run.dir=<directory> too")
    made = wanted = Path(hydra_cfg.runtime.output_dir)
    if hydra_cfg.mode is RunMode.MULTIRUN and made.name == str(hydra_cfg.job.num):
        wanted = made.with_name(_file_name(hydra_cfg.job.override_dirname) or made.name)
    for attempt in itertools.count():
        run_dir = wanted.with_name(f"{wanted.name}_{attempt}") if attempt else wanted
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            lock = os.open(run_dir / "job.json", os.O_RDWR | os.O_CREAT | (0 if resume else os.O_EXCL), 0o666)
        except FileExistsError:
            if chosen:
                advice = ", or type resume=auto to go on with it" * ("resume" in values)
                raise UserError(f"{run_dir} holds a run already: choose another{advice}") from None
        else:
            break  # else the name, a time, is taken by another run of the same second
    if wanted != made:
        with contextlib.suppress(OSError):
            made.rmdir()
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise UserError(f"{run_dir}: another run is at work in it") from None
    except OSError as error:
        print(f"{run_dir}: no lock guards it against a second run: {error.strerror}", file=sys.stderr)
    for stale in (run_dir / "logs").glob("rank*.error.json"):
        stale.unlink()
    if values.get("resume"):
        _say_what_changes(run_dir if resume else Path(values["resume"]), values)
    os.ftruncate(lock, 0)
    os.write(lock, json.dumps(values, indent=1).encode())
    OmegaConf.save(cfg, run_dir / "config.yaml")
    return run_dir, lock


def _say_what_changes(resumed: Path, values: dict[str, Any]) -> None:
    """One line for each value that differs from the job of a run directory, or of a checkpoint's."""
    for job in (resumed / "job.json", resumed.parent.parent / "job.json"):
        if job.is_file():
            for change in changes(job.read_bytes(), values):
                print(f"resumed with {change}", file=sys.stderr)
            return


def _file_name(name: str) -> str:
    """`name` without what hurts in a path, and bounded: a hash stands for what is cut off."""
    safe = re.sub(r"[^\w.,+-]+", "-", name, flags=re.ASCII)
    cut = f"{safe[:NAME_LENGTH]}-{hashlib.sha1(name.encode()).hexdigest()[:8]}"
    return safe if len(safe) <= NAME_LENGTH else cut
