"""All that flows, one record a stage: problems, rollouts, groups, documents, packed rows.

    Problem    what is asked
    Rollout    one sequence of tokens: what was asked, what the model wrote, what tools answered in between
    Group      the rollouts of one problem, with their scores
    Document   a rollout with its advantage and its weight in the loss
    PackedRow  the tensors of one micro-batch of documents
    Packed     documents on their way through all ranks: the plan, and this rank's rows
    MiniBatch  the documents of one optimizer step, packed

After sampling nothing distinguishes prompt from completion: a mask says which tokens are trained on.

Shape suffixes: B rows of a micro-batch, K positions whose logits are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

# An end token was sampled, or the room for new tokens was used up.
FINISH_REASONS = ("stop", "length")
Messages = tuple[Mapping[str, Any], ...]  # of a chat: {"role": ..., "content": ...}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One prompt of a task and its answer."""

    task: str  # the name of the task whose rewards score it
    index: int  # position in its split, so that a log can name it
    prompt: str | Messages  # as the data has it
    prompt_ids: tuple[int, ...]  # as the model sees it, with the generation header
    answer: str | tuple[str, ...] | None  # several: any of them is right; None: the data has none
    metadata: Mapping[str, Any] = field(default_factory=dict)  # the other columns of its row, for rewards

    @property
    def answers(self) -> tuple[str, ...]:
        """Any of them is right."""
        return (self.answer,) if isinstance(self.answer, str) else self.answer or ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One sequence of tokens as it was sampled. The ids are what is trained on; text is never tokenized again.

    Each token has an entry in `trained`, `logprobs` and `versions`. Example: the model is asked (5, 6), writes
    (7, 8), a tool answers (9,), and the model ends with (3,):
        Rollout(
            group=3, sample=0,
            ids=     (  5,     6,     7,    8,    9,     3),
            trained= (False, False, True, True, False, True),
            logprobs=( 0.0,   0.0,  -0.2, -0.1,  0.0,  -0.3),
            versions=(  -1,    -1,    41,   41,   -1,    42),
            turns=((2, 4), (5, 6)), finish_reason="stop",
        )

    Raises ValueError where the entries do not fit the ids or each other: no ids, entries of another number, the first
    token trained on, which nothing predicts, a trained token outside the turns, turns that overlap or lie outside.
    """

    group: int  # the problem's place in the step; its samples share it
    sample: int  # number within the group
    ids: tuple[int, ...]
    trained: tuple[bool, ...]  # does the loss count the token?
    logprobs: tuple[float, ...]  # of the distribution that the token was sampled from; 0 where it was not
    versions: tuple[int, ...]  # the step whose weights sampled the token, from 0; -1 where it was not sampled
    turns: tuple[tuple[int, int], ...]  # first and end position of each turn that the model wrote
    finish_reason: str  # one of FINISH_REASONS
    trained_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        entries = {len(self.trained), len(self.logprobs), len(self.versions)}
        if entries != {len(self.ids)}:
            raise ValueError(f"{len(self.ids)} ids, but {sorted(entries)} entries in trained, logprobs and versions")
        if not self.ids:
            raise ValueError("a rollout has at least one token")
        if self.trained[0]:
            raise ValueError("the first token of a sequence cannot be trained on: nothing predicts it")
        edges = [0, *(edge for turn in self.turns for edge in turn), len(self.ids)]
        if edges != sorted(edges):
            raise ValueError(f"turns={self.turns} overlap, or lie outside of {len(self.ids)} ids")
        outside = list(self.trained)
        for first, end in self.turns:
            outside[first:end] = [False] * (end - first)
        if any(outside):
            raise ValueError(f"token {outside.index(True)} is trained on, and turns={self.turns} say nobody sampled it")
        if self.finish_reason not in FINISH_REASONS:
            raise ValueError(f"finish_reason={self.finish_reason!r} is none of {', '.join(FINISH_REASONS)}")
        object.__setattr__(self, "trained_tokens", self.trained.count(True))

    @classmethod
    def one_turn(
        cls,
        *,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        logprobs: Sequence[float],
        finish_reason: str,
        group: int,
        sample: int = 0,
        version: int = 0,
    ) -> Rollout:
        """A prompt and its completion: the whole completion is trained on, and weights of one version sampled it."""
        first, count = len(prompt_ids), len(completion_ids)
        return cls(
            group=group,
            sample=sample,
            ids=(*prompt_ids, *completion_ids),
            trained=(False,) * first + (True,) * count,
            logprobs=(0.0,) * first + tuple(logprobs),
            versions=(-1,) * first + (version,) * count,
            turns=((first, first + count),),
            finish_reason=finish_reason,
        )

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def written(self) -> tuple[int, ...]:
        """The tokens that the model wrote, with the end token where it ended its turn."""
        return tuple(token for first, end in self.turns for token in self.ids[first:end])

    @property
    def written_tokens(self) -> int:
        return sum(end - first for first, end in self.turns)

    @property
    def finished(self) -> bool:
        return self.finish_reason == "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rollouts of one problem, which GRPO compares with each other."""

    problem: Problem
    rollouts: tuple[Rollout, ...] = ()
    scores: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """By reward, one a rollout, NaN where it could not be scored; "total" is their weighted sum."""
    failed: tuple[Mapping[str, str], ...] = ()  # of each rollout, why a reward failed, by reward

    def with_rollout(
        self, rollout: Rollout, scores: Mapping[str, float], failed: Mapping[str, str] | None = None
    ) -> Group:
        """The same group and one rollout more, with scores of the names that the others have."""
        if self.rollouts and scores.keys() != self.scores.keys():
            raise ValueError(f"scores {sorted(scores)} beside {sorted(self.scores)} of the same group")
        longer = {name: (*self.scores.get(name, ()), score) for name, score in scores.items()}
        return Group(
            problem=self.problem,
            rollouts=(*self.rollouts, rollout),
            scores=longer,
            failed=(*self.failed, failed or {}),
        )

    @property
    def trained_tokens(self) -> list[int]:
        """Of each rollout."""
        return [rollout.trained_tokens for rollout in self.rollouts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A rollout with what the loss needs of it."""

    rollout: Rollout
    advantage: float
    weight: float  # of each trained token in the loss; 0 leaves the document out
    index: int  # place in the mini-batch: a result finds its document by it, on any rank

    def __len__(self) -> int:
        return len(self.rollout)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """One micro-batch. The logits at `kept_K` predict `targets_BK`; `weights_BK` is 0 where there is no target."""

    inputs: dict[str, torch.Tensor | int | tuple | bool]  # keyword arguments of the model call, boundaries among them
    kept_K: torch.Tensor  # positions that go through the LM head, for every row
    targets_BK: torch.Tensor  # token ids
    weights_BK: torch.Tensor  # fp32
    advantages_BK: torch.Tensor  # fp32
    sampled_logprobs_BK: torch.Tensor  # fp32, by the sampler
    document_BK: torch.Tensor  # int64, which of the micro-batch's documents a position belongs to
    documents: int
    old_logprobs_BK: torch.Tensor | None = None  # by the policy before the step's first update; None: that is this one
    reference_logprobs_BK: torch.Tensor | None = None  # None: no KL penalty

    def model_inputs(self) -> dict[str, torch.Tensor | int | tuple | bool]:
        return {**self.inputs, "logits_to_keep": self.kept_K}


Row = list[Document]  # of one micro-batch
Plan = list[list[Row]]  # [rank][micro-batch][document]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Documents planned over all ranks, and the tensors of this rank's share, equally many rows on every rank."""

    plan: Plan
    rows: list[PackedRow]

    @property
    def documents(self) -> list[Document]:
        """Those of all ranks, without spares."""
        return [document for share in self.plan for row in share for document in row if document.weight]


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """The documents of one optimizer step: those with a gradient, and those without, if their tokens are measured."""

    trained: Packed
    watched: Packed | None
    left_out: int  # documents without a gradient that are not measured
    refused: int  # documents beyond the model's positions

    def each(self, change: Callable[[Packed], Packed]) -> MiniBatch:
        """The same mini-batch with both parts changed."""
        return replace(self, trained=change(self.trained), watched=self.watched and change(self.watched))
