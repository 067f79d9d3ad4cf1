"""One step as it will be packed, if every completion is as long as it may be."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain import packing
from posttrain.config import GRPOConf
from posttrain.flops import PassCost
from posttrain.packing.planning import computed_lengths
from posttrain.records import Document, Problem, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Of one optimizer step, over all ranks."""

    completions: int
    tokens: int  # prompts and completions
    computed_tokens: int  # padding included
    rows: int  # micro-batches of all ranks
    micro_batches: int  # of one rank
    fill: float  # real over computed tokens
    rank_imbalance: float  # the busiest rank's FLOPs over the mean rank's
    largest_row: int  # computed tokens of the longest micro-batch

    def in_words(self, ranks: int) -> str:
        return (
            f"{self.completions:,} completions of {self.tokens:,} tokens, prompts included; {self.micro_batches} "
            f"micro-batch{'es' * (self.micro_batches != 1)} a rank on {ranks} rank{'s' * (ranks != 1)}, the largest of "
            f"{self.largest_row:,} tokens; fill {self.fill:.2f}, imbalance {self.rank_imbalance:.2f}"
        )


def largest_step(problems: list[Problem], cfg: GRPOConf, ranks: int, cost: PassCost) -> Step:
    """The first of a step's mini-batches, on `ranks` ranks, for these problems and completions of full length."""
    room = cfg.rollout.max_new_tokens
    documents = [
        Document(rollout=_full(problem, room, group, sample), advantage=1.0, weight=1.0, index=number)
        for number, (group, problem, sample) in enumerate(
            (group, problem, sample)
            for group, problem in enumerate(problems[:: cfg.algorithm.mini_batches])
            for sample in range(cfg.rollout.group_size)
        )
    ]
    plan = packing.plan(documents, packing.spare(documents[0].rollout), cfg.packing, ranks, cost)
    found = packing.statistics([plan], cfg.packing, cost)
    rows = [row for share in plan for row in share]
    computed = [sum(computed_lengths(row, cfg.packing)) for row in rows]
    return Step(
        completions=len(documents),
        tokens=sum(map(len, documents)),
        computed_tokens=sum(computed),
        rows=len(rows),
        micro_batches=len(plan[0]),
        fill=found["packing/fill"],
        rank_imbalance=found["packing/rank_imbalance"],
        largest_row=max(computed),
    )


def _full(problem: Problem, room: int, group: int, sample: int) -> Rollout:
    return Rollout.one_turn(
        prompt_ids=problem.prompt_ids,
        completion_ids=(problem.prompt_ids[-1],) * room,
        logprobs=(0.0,) * room,
        finish_reason="length",
        group=group,
        sample=sample,
    )
