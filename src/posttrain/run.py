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
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from posttrain import packing, preemption
from posttrain.config import GRPOConf, TrainingConf
from posttrain.facts import known_facts, meter
from posttrain.metrics.first_step import look_at_first_step
from posttrain.metrics.step import performance_metrics, timed
from posttrain.preemption import Preempted
from posttrain.records import Group, MiniBatch
from posttrain.rollout.evaluation import evaluate
from posttrain.rollout.held_out import HeldOut, check_metric
from posttrain.tasks import Task
from posttrain.tracking import whereabouts
from posttrain.tracking.files import history, is_finished
from posttrain.tracking.tracker import Tracker
from posttrain.training import optim
from posttrain.training.export import export
from posttrain.training.fingerprints import fingerprints
from posttrain.training.fsdp import from_all_ranks, on_any_rank
from posttrain.training.policy import Policy
from posttrain.training.reference import Reference
from posttrain.training.resume import resume
from posttrain.training.saving import Saver
from posttrain.training.snapshot import generator_states


class Run:
    """Made on every rank, also where only the main rank writes. Leaving it closes the run's files, whatever happened.

    Raises UserError where the run cannot resume as `cfg.resume` says, or no prompt leaves room for a completion.
    """

    def __init__(
        self, cfg: TrainingConf, run_dir: Path, policy: Policy, task: Task, reference: Reference | None = None
    ) -> None:
        self.cfg, self.run_dir, self.policy, self.task, self.reference = cfg, run_dir, policy, task, reference
        self.facts = known_facts(policy, task, cfg)
        self.meter = meter(policy, cfg)
        self.facts["mfu"] = self.meter.summary() if self.meter else {"available": False, "reason": "metrics=none"}

        main = dist.get_rank() == 0
        self._fingerprints = fingerprints(task.train, cfg) if main else {}
        resumed = resume(cfg, run_dir, policy, reference, self._fingerprints)
        self.facts |= resumed.facts()
        self.start = resumed.step
        check_metric(cfg, task)
        judged = history(run_dir, cfg.evaluation.metric, self.start) if main and cfg.resume == "auto" else []
        self.held_out = HeldOut(cfg, resumed.evaluation, self.start, from_all_ranks(judged))
        self._saver = Saver(run_dir, cfg.checkpoint, cfg.evaluation.metric, cfg.launch.timeout_s)
        self.step = self.steps_done = self.start
        self.skipped = 0  # optimizer steps in a row
        # The number of steps after which it was.
        self._saved = self.start if self.start else None
        self._generators: dict[str, Any] | None = None
        self._updated = False  # in this step
        self._cold = True
        self.done = cfg.resume == "auto" and self._over() and is_finished(run_dir, cfg.checkpoint.export)
        if self.done and main:
            print(f"nothing left to do: step {self.start} of steps={cfg.steps} is done")
        self._tracker = Tracker(run_dir, cfg.logger, main and not self.done, cfg.steps, self.start)

    def __enter__(self) -> Self:
        self._tracker.__enter__()
        self._tracker.start(self.facts)
        preemption.can_save(not self.done)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if kind is Preempted:
                # All ranks have agreed on it, at the same point.
                self._save()
            preemption.can_save(False)
            if kind in (None, Preempted):
                self._saver.wait()
        except BaseException as failure:
            kind, error = type(failure), failure
            raise
        finally:
            self._saver.give_up()
            self._tracker.__exit__(kind, error, trace)

    def steps(self) -> Iterator[int]:
        """The steps that are left, from 0. The first one compiles, and one after a pause finds caches cold.

        Raises Preempted, on all ranks, once one of them was asked to make room and nothing of a step is half done.
        """
        if self.done:
            return
        self.step = self.start - 1
        if self.start and self.due(self.cfg.evaluation.every) and not self.held_out.is_of(self.start):
            # The run that is resumed ended between this step and its evaluation.
            self.evaluate()
        while not self._over():
            self._tracker.check()
            self._saver.check()
            self.step = self.steps_done
            self._generators = generator_states()
            self._updated = False
            self.seconds: dict[str, float] = {}
            self._agree_to_go_on()
            self._began = time.perf_counter()
            yield self.step

    def _over(self) -> bool:
        """Is the last step done, or do the evaluations say that more are of no use?"""
        return self.steps_done >= self.cfg.steps or self.held_out.end is not None

    def _agree_to_go_on(self) -> None:
        """A collective: raises Preempted on all ranks if one of them was asked to make room."""
        if on_any_rank(preemption.asked()):
            raise Preempted

    def due(self, every: int) -> bool:
        """After this step; never where `every` is 0."""
        return every > 0 and (self.step + 1) % every == 0

    @property
    def measures_all(self) -> bool:
        """Do this step's token metrics cover the tokens without a gradient too?"""
        assert isinstance(self.cfg, GRPOConf)
        every = self.cfg.metrics.full_every
        return every > 0 and self.step % every == 0

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """The seconds inside count as this phase of the step. Until the weights change it can be given up after it."""
        whereabouts.at(self.step + 1, phase)
        with timed(self.seconds, phase):
            yield
        if not self._updated:
            self._agree_to_go_on()

    def bill(
        self, batches: Sequence[MiniBatch], updates: int = 1, logprobs: int = 0, sampled: Sequence[Group] = ()
    ) -> None:
        """The FLOPs of this step: passes over `batches` to update and for logprobs, and what was sampled."""
        if self.meter:
            self.meter.bill(batches, updates, logprobs, sampled)

    def count_skipped(
        self, norm: float | None, token_losses: Sequence[torch.Tensor], mini_batch: MiniBatch, indices: Sequence[int]
    ) -> None:
        """After each optimizer step: warn of one that was skipped (`norm` is None), and name the problems at fault.

        `indices`: of the step's problems, by their place. Raises FloatingPointError after optim.max_skipped in a row.
        """
        self._updated = True
        self.skipped = self.skipped + 1 if norm is None else 0
        if self.skipped:
            share = mini_batch.trained.plan[dist.get_rank()]
            places = from_all_ranks(packing.not_finite(token_losses, share, self.cfg.packing))
            optim.say_skipped(self.step + 1, self.skipped, [indices[place] for place in places], self.cfg.optim)

    def log(self, metrics: dict[str, Any]) -> None:
        """The record of this step, `num_tokens` among its metrics.

        Raises UserError where no completion of the first step could be scored, and with `cfg.strict` RuntimeError where
        something in it is suspicious.
        """
        self.seconds["step"] = time.perf_counter() - self._began
        found = metrics | performance_metrics(self.seconds, metrics["num_tokens"], self.policy.device, self._cold)
        if self.meter:
            found |= self.meter.metrics(self.seconds)
        self._tracker.log(self.step + 1, found)
        self.steps_done, self._generators = self.step + 1, None
        self.held_out.begin_step()
        self._cold = False
        if self.step == self.start:
            warnings = look_at_first_step(found, self.policy, self.cfg)
            self._tracker.warn("first step", warnings)
            if warnings and self.cfg.strict:
                raise RuntimeError("strict=true: " + "; ".join(warnings))
        if self.meter and self.meter.reason != self.facts["mfu"]["reason"]:
            # The meter failed in this step.
            self.facts["mfu"] = self.meter.summary()
            self._tracker.summary(mfu=self.facts["mfu"])

    def evaluate(self) -> None:
        """On the held-out problems, if there are any."""
        found: dict[str, float] = {}
        if self.task.heldout[: self.cfg.evaluation.prompts]:
            with self._pause("evaluation") as record:
                record |= evaluate(self.policy, self.task, self.cfg)
            found = {name: value for name, value in record.items() if name != "time/evaluation"}
        self.held_out.add(found, self.steps_done)
        early = self.held_out.end if self.steps_done < self.cfg.steps else None
        self._tracker.summary(evaluation=found, ended_early=early)

    def save(self) -> None:
        """A checkpoint, after the records that it stands for."""
        with self._pause("checkpoint"):
            self._save()

    def _save(self) -> None:
        """Of the steps that are done: one that was given up has left weights and optimizer as they were."""
        if self._saved == self.steps_done:
            return
        self._tracker.sync()
        generators = self._generators or generator_states()
        state = self.policy.model, self.policy.optimizer, self.reference
        self._saver.save(*state, self.steps_done, generators, self.held_out.last, self._fingerprints)
        self._saved = self.steps_done

    @contextlib.contextmanager
    def _pause(self, name: str) -> Iterator[dict[str, Any]]:
        """Between two steps, in the time of neither: what is put into the dict becomes a record of its own."""
        whereabouts.at(self.steps_done, name)
        record: dict[str, Any] = {}
        seconds: dict[str, float] = {}
        with timed(seconds, name):
            yield record
        self._agree_to_go_on()
        record[f"time/{name}"] = seconds[name]
        self._tracker.log(self.steps_done, record)
        self._cold = True

    def finish(self) -> None:
        """After the last step: a checkpoint, an evaluation, unless they were just made, and the model exported."""
        if self.done:
            return
        if self.cfg.checkpoint.every and self._saved != self.steps_done:
            self.save()
        if not self.held_out.is_of(self.steps_done):
            self.evaluate()
        whereabouts.at(self.steps_done, "export")
        self._saver.wait()
        if self.cfg.checkpoint.export:
            policy = self.policy
            export(policy.accelerator, policy.model, policy.tokenizer, self.run_dir / "model", self.cfg.model)
        if self.meter:
            self._tracker.summary(mfu=self.meter.summary())
