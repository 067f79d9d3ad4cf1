"""FLOPs as a function of the documents alone: what a walk over the modules found, to be evaluated every step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Chunk:
    """Attention that sees only its own chunk of so many positions, counted from the document's first."""

    size: int


Span = int | Chunk | None  # how far a query sees: a sliding window, a chunk, or everything before it
Unit = str | tuple[str, Span]  # what is billed for: a "token", a "logit", or a query-key ("pair", span)
Key = tuple[str, Unit, str | None]  # part of the model, unit, decoder layer


@dataclass(frozen=True)
class PassCost:
    """FLOPs of one pass through the model, or through a part of it."""

    per_token: float = 0
    per_logit: float = 0  # the LM head, for one position
    per_pair: dict[Span, float] = field(default_factory=dict)  # one query-key pair in all layers of that span

    def __call__(self, lengths: Sequence[int], logits: int) -> float:
        attention = sum(flops * causal_pairs(lengths, span) for span, flops in self.per_pair.items())
        return float(self.per_token * sum(lengths) + self.per_logit * logits + attention)

    def dense(self, lengths: Sequence[int], logits: int) -> float:
        """With every query multiplied by every key of its document, as eager attention does before it masks."""
        pairs = sum(length**2 for length in lengths)
        return float(self.per_token * sum(lengths) + self.per_logit * logits + sum(self.per_pair.values()) * pairs)


@dataclass(frozen=True)
class FlopsCounter:
    """FLOPs for documents of these `lengths` in tokens, the LM head computing `logits` positions in all."""

    forward_cost: PassCost
    training_cost: PassCost
    recomputed_cost: PassCost  # the forward pass of the decoder layers that a gradient passes
    parts: dict[str, PassCost]  # of the forward pass, by name

    def forward(self, lengths: Sequence[int], logits: int) -> float:
        """A pass without gradients: old or reference log-probabilities, evaluation, prefill and decoding."""
        return self.forward_cost(lengths, logits)

    def training(self, lengths: Sequence[int], logits: int) -> float:
        """Forward and backward: 3x for trainable weights, 2x for frozen ones that a gradient passes."""
        return self.training_cost(lengths, logits)

    def hardware(self, lengths: Sequence[int], logits: int, checkpointing: bool) -> float:
        """What an update executes: `training`, and under activation checkpointing the decoder layers once more."""
        return self.training(lengths, logits) + checkpointing * self.recomputed_cost(lengths, logits)

    def rollout(self, groups: Sequence[tuple[int, Sequence[int]]]) -> float:
        """Sampling: (prompt length, lengths of its completions) of each group.

        A group's prompt is prefilled once, and gives the logits of every first token; a completion's last token is
        never fed back.
        """
        prompts = [prompt for prompt, completions in groups for _ in completions]
        rows = [prompt + n - 1 for prompt, completions in groups for n in completions]
        later = sum(n - 1 for _, completions in groups for n in completions)
        prefill = self.forward_cost([prompt for prompt, _ in groups], len(groups))
        return prefill + self.forward_cost(rows, later) - self.forward_cost(prompts, 0)


def causal_pairs(lengths: Sequence[int], span: Span = None) -> int:
    """Query-key pairs of causal attention: position p of a document, from 1, sees min(p, window) keys."""
    if isinstance(span, Chunk):
        chunks = [piece for n in lengths for piece in (span.size,) * (n // span.size) + (n % span.size,)]
        return causal_pairs(chunks)
    pairs = 0
    for length in lengths:
        inside = length if span is None else min(length, span)
        pairs += inside * (inside + 1) // 2 + (length - inside) * inside
    return pairs


def total(flops: Mapping[Key, float], keys: Iterable[Key]) -> PassCost:
    """The cost of those `keys` of a count."""
    units: defaultdict[Unit, float] = defaultdict(int)
    for key in keys:
        units[key[1]] += flops[key]
    pairs = {unit[1]: count for unit, count in units.items() if isinstance(unit, tuple)}
    return PassCost(units["token"], units["logit"], pairs)
