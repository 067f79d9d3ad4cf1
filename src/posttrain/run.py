"""One run from its first step to its last: where it resumes, its clock, its records, and the pauses between steps.

with Run(cfg, run_dir, policy, task) as run:
    for step in run.steps():
        with run.timed("update"):
            ...
        run.log({"loss": ...})
    run.finish()
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from posttrain import packing
from posttrain.config import GRPOConf, MetricsName, TrainingConf
from posttrain.errors import UserError
from posttrain.metrics.first_step import suspicious
from posttrain.metrics.step import performance_metrics, timed
from posttrain.records import Group, MiniBatch
from posttrain.rollout.evaluation import evaluate
from posttrain.rollout.probe import prove_sampler
from posttrain.tasks import Task
from posttrain.tasks.references import score_answers
from posttrain.tracking.tracker import Tracker, truncate_after
from posttrain.training import checkpoint, optim
from posttrain.training.export import export
from posttrain.training.fsdp import from_all_ranks
from posttrain.training.policy import Policy
from posttrain.training.reference import Reference


class Run:
    """Made on every rank, also where only the main rank writes. Leaving it closes the run's files, whatever happened.

    Raises UserError where the run cannot resume as `cfg.resume` says, or no prompt leaves room for a completion.
    """

    def __init__(
        self, cfg: TrainingConf, run_dir: Path, policy: Policy, task: Task, reference: Reference | None = None
    ) -> None:
        self.cfg, self.run_dir, self.policy, self.task, self.reference = cfg, run_dir, policy, task, reference
        self.facts = {
            **policy.facts,
            "world_size": dist.get_world_size(),
            "task": {"train": len(task.train), "heldout": len(task.heldout), "dropped": dict(task.dropped)},
            "template": task.template.facts(),
            "optim": {key: getattr(cfg.optim, key) for key in ("lr", "schedule", "warmup_steps")},
            "every": {
                "evaluation": cfg.evaluation.every if cfg.evaluation.prompts else 0,
                "checkpoint": cfg.checkpoint.every,
            },
        }
        if isinstance(cfg, GRPOConf) or cfg.evaluation.prompts:
            self.facts["sampler"] = prove_sampler(policy, cfg)
        if isinstance(cfg, GRPOConf):
            self.facts["max_staleness"] = cfg.rollout.max_staleness
            self.facts["answers"] = score_answers(task, cfg.task).facts()
            room = packing.short_of_room(task.train, cfg.rollout.max_new_tokens, policy.longest)
            self.facts["packing"] = policy.facts["packing"] | {
                "warnings": [*policy.facts["packing"]["warnings"], *room]
            }
        self.meter = None
        if cfg.metrics.name is MetricsName.mfu:
            # Runs with metrics=none do without the import.
            from posttrain.metrics.mfu import make_meter

            # What is sampled for a later step takes this step's time.
            ahead = isinstance(cfg, GRPOConf) and cfg.rollout.max_staleness > 0
            where = policy.device, policy.dtype, dist.get_world_size()
            self.meter = make_meter(cfg.metrics, policy.model, *where, ahead)
        self.facts["mfu"] = self.meter.summary() if self.meter else {"available": False, "reason": "metrics=none"}

        resumed = checkpoint.find(cfg.resume, run_dir)
        self.start = checkpoint.load(policy.accelerator, policy.model, resumed, reference) if resumed else 0
        self.done = checkpoint.nothing_left(cfg.resume, self.start, cfg.steps)
        self.facts["resumed_from"] = str(resumed) if resumed else None
        self.step = self.start
        self.skipped = 0  # optimizer steps in a row
        self._evaluated: int | None = None  # the step after which it was
        self._cold = True
        writes = dist.get_rank() == 0 and not self.done
        if writes:
            truncate_after(run_dir, self.start)
        self._tracker = Tracker(run_dir, cfg.logger, writes, dataclasses.asdict(cfg), cfg.steps)

    def __enter__(self) -> Self:
        self._tracker.__enter__()
        self._tracker.start(self.facts)
        return self

    def __exit__(self, *error: Any) -> None:
        self._tracker.__exit__(*error)

    def steps(self) -> Iterator[int]:
        """The steps that are left, from 0. The first one compiles, and one after a pause finds caches cold."""
        for step in range(self.start, self.cfg.steps):
            self.step = step
            self.seconds: dict[str, float] = {}
            self._began = time.perf_counter()
            yield step

    @property
    def last(self) -> bool:
        return self.step + 1 == self.cfg.steps

    def due(self, every: int) -> bool:
        """After this step; never where `every` is 0."""
        return every > 0 and (self.step + 1) % every == 0

    @property
    def measures_all(self) -> bool:
        """Do this step's token metrics cover the tokens without a gradient too?"""
        assert isinstance(self.cfg, GRPOConf)
        every = self.cfg.metrics.full_every
        return every > 0 and self.step % every == 0

    def steps_to_ask_for(self, ahead: int) -> int:
        """From this step on: itself and up to `ahead` more, but none beyond the next checkpoint.

        A run that resumes there asks for the same steps with the same weights.
        """
        every = self.cfg.checkpoint.every
        end = min(self.cfg.steps, (self.step // every + 1) * every) if every else self.cfg.steps
        return min(1 + ahead, end - self.step)

    def timed(self, phase: str) -> contextlib.AbstractContextManager[None]:
        """The seconds inside count as this phase of the step."""
        return timed(self.seconds, phase)

    def bill(
        self, batches: Sequence[MiniBatch], updates: int = 1, logprobs: int = 0, sampled: Sequence[Group] = ()
    ) -> None:
        """The FLOPs of this step: passes over `batches` to update and for logprobs, and what was sampled."""
        if self.meter:
            self.meter.bill(batches, updates, logprobs, sampled)

    def count_skipped(
        self,
        norm: float | None,
        token_losses: Sequence[torch.Tensor],
        mini_batch: MiniBatch,
        indices: Sequence[int],
    ) -> None:
        """After each optimizer step: warn of one that was skipped (`norm` is None), and name the problems at fault.

        `indices`: of the step's problems, by their place. Raises FloatingPointError after optim.max_skipped in a row.
        """
        self.skipped = self.skipped + 1 if norm is None else 0
        if self.skipped:
            share = mini_batch.trained.plan[dist.get_rank()]
            places = from_all_ranks(packing.not_finite(token_losses, share, self.cfg.packing))
            optim.say_skipped(self.step + 1, self.skipped, [indices[place] for place in places], self.cfg.optim)

    def log(self, metrics: dict[str, Any]) -> None:
        """The record of this step, `num_tokens` among its metrics."""
        self.seconds["step"] = time.perf_counter() - self._began
        found = metrics | performance_metrics(self.seconds, metrics["num_tokens"], self.policy.device, self._cold)
        if self.meter:
            found |= self.meter.metrics(self.seconds)
        self._tracker.log(self.step + 1, found)
        self._cold = False
        if self.step == self.start:
            self._look_at_first_step(found)
        if self.meter and self.meter.reason != self.facts["mfu"]["reason"]:
            # The meter failed in this step.
            self.facts["mfu"] = self.meter.summary()
            self._tracker.summary(mfu=self.facts["mfu"])

    def _look_at_first_step(self, metrics: dict[str, Any]) -> None:
        """Warn of suspicious values, or with `cfg.strict` raise RuntimeError. All ranks see the same values.

        Raises UserError where no completion at all could be scored: more steps would train on nothing.
        """
        policy = self.policy
        if metrics.get("frac_reward_unscorable") == 1:
            raise UserError(
                f"task={self.cfg.task.name}: no completion of the first step could be scored. The answers do not fit "
                "the reward: look at task.answer_column, and type task.answer_reward=exact for answers in words"
            )
        ends = repr(policy.tokenizer.convert_ids_to_tokens(sorted(policy.end_ids)))
        found = suspicious(metrics, self.cfg, policy.vocabulary, policy.dtype, ends)
        self._tracker.warn("first step", found)
        if found and self.cfg.strict:
            raise RuntimeError("strict=true: " + "; ".join(found))

    def evaluate(self) -> dict[str, float]:
        """On the held-out problems; {} where there are none."""
        self._evaluated = self.step
        if not self.task.heldout[: self.cfg.evaluation.prompts]:
            self._tracker.summary(evaluation={})
            return {}
        with self._pause("evaluation") as record:
            record |= evaluate(self.policy, self.task, self.cfg)
        held_out = {name: value for name, value in record.items() if name != "time/evaluation"}
        self._tracker.summary(evaluation=held_out)
        return held_out

    def save(self) -> None:
        """A checkpoint, after the records that it stands for."""
        policy, keep = self.policy, self.cfg.checkpoint.keep
        with self._pause("checkpoint"):
            checkpoint.save(policy.accelerator, policy.model, self.run_dir, self.step + 1, keep, self.reference)

    @contextlib.contextmanager
    def _pause(self, name: str) -> Iterator[dict[str, Any]]:
        """Between two steps, in the time of neither: what is put into the dict becomes a record of its own."""
        record: dict[str, Any] = {}
        seconds: dict[str, float] = {}
        with timed(seconds, name):
            yield record
        record[f"time/{name}"] = seconds[name]
        self._tracker.log(self.step + 1, record)
        self._cold = True

    def finish(self) -> None:
        """After the last step: evaluate, unless that was just done, and export the model."""
        if self.done:
            return
        if self._evaluated != self.step:
            self.evaluate()
        if self.cfg.checkpoint.export:
            policy, path = self.policy, self.run_dir / "model"
            export(policy.accelerator, policy.model, policy.tokenizer, path, self.cfg.model)
        if self.meter:
            self._tracker.summary(mfu=self.meter.summary())
