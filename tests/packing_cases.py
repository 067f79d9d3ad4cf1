"""What packing is tried on: document lengths, row orders, masks with gaps, and ways to leak; each with what it catches.

A document of n tokens is one entry of a tuple; a row is the tuple. Masks are strings: 1 is trained on, 0 is not.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import torch

from posttrain.config import PackingConf, PackingMode
from posttrain.flops import PassCost
from posttrain.models.packed.boundaries import BOUNDARIES
from posttrain.records import Document, Rollout

# Around all that has a size: one token, the convolution's width, the chunk of 64 of delta rules and scans.
MIXED = (1, 2, 13, 17, 64, 65)
# Every position is a boundary: no decay, tap or query may see the position before it.
ONE_TOKEN_EACH = (1,) * 64
# Shorter than the convolution of 4: its taps would reach into the document before the last.
SHORTER_THAN_THE_CONVOLUTION = (3, 3, 3, 3)
# Two chunks and a rest, then a document that would start within the rest's chunk.
LONG_THEN_SHORT = (130, 1, 5)
# Lengths far apart: those of similar length run as one batch, so each must find back to its own place.
UNEVEN = (700, 5, 9, 300, 1, 1, 33, 999)
# Far more padding than tokens: padding is a document of its own, and the tokens before it must not see it.
TAIL_PADDING = (10, 2048)
# More than the 4,096 positions of a fused kernel's largest block, after documents of less than a convolution.
LONGER_THAN_A_BLOCK = (3, 3, 1, 2, 4099)
# As the start-up probe has them, not in order of length: batches by length are put together again.
OUT_OF_ORDER = (13, 1, 2, 65, 17, 64)
# The short one in the middle: what leaks from before it and what leaks past it are both seen.
SHORT_IN_THE_MIDDLE = (13, 2, 17)
# Short ones beside one beyond a chunk: small enough for a second forward pass.
BEYOND_A_CHUNK = (13, 2, 65)
# One row after the other: single documents as long as a packed row before them find boundaries that were left there.
ROWS_IN_TURN = [(10, 20), (17,), (30,), (13, 17), (64,), (65,), (1,) * 30, (10, 20)]

LENGTHS = {
    "mixed": MIXED,
    "one token each": ONE_TOKEN_EACH,
    "shorter than the convolution": SHORTER_THAN_THE_CONVOLUTION,
    "long then short": LONG_THEN_SHORT,
    "out of order": OUT_OF_ORDER,
}

# Prompt and completion lengths: no prompt to speak of, no completion to speak of, and both longer than a chunk.
SHAPES = [(1, 1), (3, 1), (5, 12), (9, 3), (20, 44), (40, 25), (2, 50)]

MASKS = {
    "a completion": "0001111",
    # A tool's answer within a completion: the token after it is predicted from what the tool wrote.
    "a tool's answer": "0011100011",
    "several turns": "0110011100101",
    # The head must not be asked for the positions of a long prompt.
    "starts late": "0" * 40 + "11",
    "from the second token on": "01111",
    "a single token": "0000100",
    "the last token alone": "00001",
    # Nothing: the document takes part in every forward pass and in no loss.
    "none": "00000",
    # An answer of a tool that nothing follows.
    "a gap at the end": "00111000",
    "every other token": "01010101",
    # Longer than a chunk of the delta rule, with a gap across its border.
    "a gap across a chunk": "0" * 20 + "1" * 30 + "0" * 30 + "1" * 10,
}

# The size of the tiny models, with full attention and a window.
TINY_COST = PassCost(per_token=6e5, per_logit=5e4, per_pair={None: 512, 16: 512})


def conf(mode: str = "thd", budget: int = 128, multiple: int = 1) -> PackingConf:
    return PackingConf(mode=PackingMode(mode), tokens_per_row=budget, pad_multiple=multiple)


def document(prompt: int, completion: int, weight: float = 1.0, number: int = 0) -> Document:
    """Random tokens, logprobs and an advantage, the same for the same arguments."""
    draw = random.Random(f"{prompt} {completion} {number}")
    rollout = Rollout.one_turn(
        prompt_ids=[draw.randrange(256) for _ in range(prompt)],
        completion_ids=[draw.randrange(256) for _ in range(completion)],
        logprobs=[-draw.random() for _ in range(completion)],
        finish_reason="stop",
        group=number,
    )
    return Document(rollout=rollout, advantage=draw.uniform(-1, 1), weight=weight, index=number)


def masked(mask: str, number: int, advantage: float, weight: float, vocabulary: int = 60) -> Document:
    """A document that is trained on where `mask` has a 1. Its logprobs are no numbers where it was not sampled.

    Logprobs are whole 64ths, so that fp32 holds them exactly.
    """
    draw = random.Random(f"{mask} {number}")
    trained = tuple(letter == "1" for letter in mask)
    rollout = Rollout(
        group=number,
        sample=0,
        ids=tuple(draw.randrange(5, vocabulary) for _ in mask),
        trained=trained,
        logprobs=tuple(-draw.randrange(64, 400) / 64 if own else float("nan") for own in trained),
        versions=tuple(0 if own else -1 for own in trained),
        turns=tuple(found.span() for found in re.finditer("1+", mask)),
        finish_reason="stop",
    )
    return Document(rollout=rollout, advantage=advantage, weight=weight, index=number)


def without_boundaries(function):
    """The silent skip: a kernel that is called as if the row were one document."""

    def leaking(*args, **kwargs):
        return function(*args, **{k: v for k, v in kwargs.items() if k not in BOUNDARIES})

    leaking.kernel_for = function.kernel_for
    return leaking


def with_stale_boundaries(function):
    """Boundaries stored at a packed call and still there at the next, of one document."""
    stored = {}

    def leaking(*args, **kwargs):
        tokens_in_row = args[0].shape[2 if args[0].dim() == 3 else 1]
        if len(kwargs.get("document_lengths", ())) > 1:
            stored.update(document_lengths=kwargs["document_lengths"])
        stale = stored.get("document_lengths", ())
        kwargs = {k: v for k, v in kwargs.items() if k not in BOUNDARIES}
        return function(*args, **kwargs, **(stored if sum(stale) == tokens_in_row else {}))

    leaking.kernel_for = function.kernel_for
    return leaking


class Smear(torch.autograd.Function):
    """The identity; in backward every token's gradient also reaches its left neighbour."""

    @staticmethod
    def forward(ctx, x, tokens_dim):
        ctx.tokens_dim = tokens_dim
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad + grad.roll(-1, dims=ctx.tokens_dim), None


def with_leaking_gradient(function):
    """Right forward, wrong backward."""

    def leaking(x, *args, **kwargs):
        return function(Smear.apply(x, -1), *args, **kwargs)

    leaking.kernel_for = function.kernel_for
    return leaking


def merging(function, kept_apart: int):
    """A kernel whose boundaries arrive, and that keeps only the first documents apart; `lengths` is its eighth."""

    def leaking(raw, x, dt, A, B, C, chunk, lengths: Sequence[int], **kwargs):
        lengths = (*lengths[:kept_apart], sum(lengths[kept_apart:]))
        return function(raw, x, dt, A, B, C, chunk, lengths, **kwargs)

    return leaking
