"""The rewards of a task by name: which there are, what they weigh, and what a completion gets from all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from posttrain.config.reward import OnError, RewardConf
from posttrain.errors import UserError
from posttrain.rewards import kinds
from posttrain.rewards.calling import COUNTS, Failure, Function, Sample, Value, call
from posttrain.rewards.workers import Job, Workers

Source = str | Function  # a name of kinds.KINDS, python:<file>:<function>, or a function that runs in this process


class Scored(NamedTuple):
    """What one completion got."""

    scores: dict[str, float]  # by reward, unweighted, NaN where there is none; "total" is their weighted sum
    failed: dict[str, str]  # why, by reward, where a reward failed


def choose(
    own: Mapping[str, Source], own_weights: Mapping[str, float], cfg: RewardConf
) -> dict[str, tuple[Source, float]]:
    """The rewards to use, by name, with their weights: those of `reward.weights`, a user's file, or the task's `own`.

    Raises UserError for names that mean nothing, or two rewards.
    """
    places = [cfg.python] if isinstance(cfg.python, str) else cfg.python or []
    of_files = {kinds.split(place)[1]: f"{kinds.PYTHON}{place}" for place in places}
    if len(of_files) < len(places):
        raise UserError(f"reward.python={','.join(places)}: two functions of one name; rename one of them")
    if not cfg.weights:
        return {name: (source, 1.0) for name, source in of_files.items()} or {
            name: (source, own_weights.get(name, 1.0)) for name, source in own.items()
        }
    known: dict[str, Source] = {**{name: name for name in kinds.KINDS}, **own, **of_files}
    if unknown := [name for name in cfg.weights if name not in known]:
        raise UserError(f"reward.weights: there is no reward {unknown[0]}; there are {', '.join(known)}")
    if not any(cfg.weights.values()):
        raise UserError("reward.weights: each weight is 0, and nothing would count")
    return {name: (known[name], weight) for name, weight in cfg.weights.items()}


class Scorer:
    """Scores completions with its rewards; those that may take long run in `workers`.

    Raises UserError for a reward that cannot be made.
    """

    def __init__(self, rewards: Mapping[str, tuple[Source, float]], cfg: RewardConf, workers: Workers) -> None:
        self.cfg, self._workers = cfg, workers
        self.weights = {name: weight for name, (_, weight) in rewards.items()}
        self._sources = {name: source for name, (source, _) in rewards.items()}
        contained = [
            source for source in self._sources.values() if isinstance(source, str) and kinds.is_contained(source)
        ]
        # Of a whole group, or of one sample.
        self._contained = {source: workers.takes_groups(source) for source in contained}
        self._here = {
            name: kinds.make(source, cfg) if isinstance(source, str) else source
            for name, source in self._sources.items()
            if source not in contained
        }

    @property
    def first(self) -> str:
        """The name of the reward that says what is right: "correct", or the first of a task that has none."""
        return "correct" if "correct" in self._sources else next(iter(self._sources))

    @property
    def judges_answers(self) -> bool:
        """Does the first reward know right answers by giving them 1? A user's own may count in any way."""
        source = self._sources[self.first]
        return not (isinstance(source, str) and source.startswith(kinds.PYTHON))

    def of(self, name: str, groups: Sequence[Sequence[Sample]]) -> list[list[Value]]:
        """What one reward says of each sample of each group."""
        source = self._sources[name]
        if name in self._here:
            return [call(self._here[name], group, any_answer=True) for group in groups]
        assert isinstance(source, str)
        if self._contained[source]:
            return self._workers.values([Job(source, group) for group in groups])
        each = iter(self._workers.values([Job(source, [sample]) for group in groups for sample in group]))
        return [[next(each)[0] for _ in group] for group in groups]

    def score(self, groups: Sequence[Sequence[Sample]]) -> list[list[Scored]]:
        """All rewards of each sample. Samples of a group belong to one problem, and get scores of the same names.

        Raises RuntimeError for a failure where `reward.on_error` is raise.
        """
        values = {name: self.of(name, groups) for name in self._sources}
        return [self._scored({name: of_all[place] for name, of_all in values.items()}) for place in range(len(groups))]

    def _scored(self, values: Mapping[str, Sequence[Value]]) -> list[Scored]:
        """Of one group. What a dict holds besides its score is named reward/entry."""
        samples = range(len(next(iter(values.values()))))
        found = [Scored({}, {}) for _ in samples]
        for name, of_group in values.items():
            entries = dict.fromkeys(key for each in of_group if isinstance(each, dict) for key in each if key != COUNTS)
            for scored, value in zip(found, of_group, strict=True):
                if isinstance(value, Failure):
                    scored.failed[name] = str(value)
                    value = self._instead(name, value)
                parts = value if isinstance(value, dict) else {COUNTS: value}
                scored.scores[name] = _or_nan(parts[COUNTS])
                for entry in entries:
                    scored.scores[f"{name}/{entry}"] = _or_nan(parts.get(entry))
        for scored in found:
            scored.scores["total"] = sum(w * scored.scores[name] for name, w in self.weights.items() if w)
        return found

    def _instead(self, name: str, failure: Failure) -> float | None:
        if self.cfg.on_error is OnError.error:
            raise RuntimeError(f"the reward {name} failed: {failure} (reward.on_error=drop or zero goes on)")
        return 0.0 if self.cfg.on_error is OnError.zero else None


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
