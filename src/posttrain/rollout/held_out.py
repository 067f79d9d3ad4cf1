"""The evaluations of a run so far: the last one, and whether they say that more steps are of no use."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.config import EvaluationConf, SFTConf, TrainingConf
from posttrain.errors import UserError
from posttrain.rollout.statistics import is_stale, powers
from posttrain.tasks import Task

GOAL = "eval/rewards/correct"  # what recipes/sft.py compares with stop_at


class HeldOut:
    """`last` is the evaluation after the steps that are done, {} where there is none.

    Args:
        last: of the checkpoint that the run resumes from.
        step: steps that are done.
        judged: evaluation.metric in the run's evaluations so far.
    """

    def __init__(self, cfg: TrainingConf, last: dict[str, float], step: int, judged: Sequence[float]) -> None:
        self.cfg, self.last = cfg, last
        self._step = step if last else None
        self._judged = list(judged)

    def add(self, found: dict[str, float], step: int) -> None:
        """One more evaluation, after `step` steps."""
        self.last, self._step = found, step
        if self.cfg.evaluation.metric in found:
            self._judged.append(found[self.cfg.evaluation.metric])

    def begin_step(self) -> None:
        """The weights change: the last evaluation is no longer of them."""
        self.last = {}

    def is_of(self, step: int) -> bool:
        """Was there one after this step, or none to make?"""
        return self._step == step

    @property
    def end(self) -> str | None:
        """Why the run ends before its last step; None if it goes on."""
        goal, evaluation = self.cfg.stop_at if isinstance(self.cfg, SFTConf) else None, self.cfg.evaluation
        if goal is not None and self.last.get(GOAL, -1.0) >= goal:
            return f"{GOAL} has reached stop_at={goal:g}"
        if is_stale(self._judged, evaluation.patience):
            best = max(self._judged)
            return f"no {evaluation.metric} better than {best:.4g} in {evaluation.patience} evaluations"
        return None


def check_metric(cfg: TrainingConf, task: Task) -> None:
    """Raises UserError where a run is judged by a metric that its evaluations will not have."""
    best, evaluation = cfg.checkpoint.best, cfg.evaluation
    options = {"evaluation.metric": evaluation.metric} if best is True or evaluation.patience else {}
    options |= {"checkpoint.best": best} if isinstance(best, str) else {}
    names = _names(task, evaluation)
    for option, metric in options.items():
        # What a reward of the user's own adds to its score has a name that only it knows, and so has a column's value.
        open_ends = [f"{name}/" for name in names if name.startswith("eval/rewards/")]
        open_ends += [f"eval/{evaluation.by}/"] if evaluation.by else []
        if metric not in names and not metric.startswith(tuple(open_ends)):
            raise UserError(f"{option}={metric}: an evaluation has {', '.join(names)}")


def _names(task: Task, cfg: EvaluationConf) -> list[str]:
    rewards = dict.fromkeys(name for scorer in task.rewards.values() for name in scorer.weights)
    votes = [f"eval/maj@{cfg.samples}"] if cfg.samples > 1 else []
    shares = [f"eval/pass@{k}" for k in powers(cfg.samples)]
    ends = [f"eval/{name}/{end}" for name in ("reward", "pass@1") for end in ("low", "high")]
    return ["eval/reward", *(f"eval/rewards/{name}" for name in rewards), *shares, *votes, *ends]
