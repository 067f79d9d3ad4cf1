"""Model FLOPs, counted once from the modules of the instantiated model.

Model FLOPs are the matrix multiplications the mathematics needs, 2mnk each: what MFU divides by time and peak
(Chowdhery et al., PaLM, appendix B). A causal query is billed for the keys it may see, packed documents each
on their own, linear attention for its recurrence, the LM head for the positions whose logits are computed.
Recomputed activations, embedding look-ups, norms and softmax are not billed; nor are vision towers, which
text tokens do not pass. Shapes are read from modules, not from config fields, whose names and meanings differ
between families. What is not understood is refused by name: an MFU is right or absent. docs/flops.md has the
formulas, and every architecture of transformers against a FLOP counter.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from posttrain.flops.cost import Chunk, FlopsCounter, PassCost, causal_pairs
from posttrain.flops.walk import size

__all__ = ["Chunk", "FlopsCounter", "PassCost", "causal_pairs", "forward_flops", "size"]


def forward_flops(
    model: nn.Module, document_lengths: Sequence[int], logit_positions: int | None = None
) -> dict[str, float]:
    """FLOPs of a forward pass by part of the model; they sum to `size(model).forward`.

    The LM head computes `logit_positions` positions in all, by default every one. Raises ValueError as `size` does.
    """
    logits = sum(document_lengths) if logit_positions is None else logit_positions
    return {part: cost(document_lengths, logits) for part, cost in size(model).parts.items()}
