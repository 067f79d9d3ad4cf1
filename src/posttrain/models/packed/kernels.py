"""Documents in one row: their boundaries, and the gated delta rule and its short convolution in plain torch.

The reference kernels are for CPUs, for tests and for GPUs without fused ones. They are exact: a document's
result does not depend on what else is in the row. They regroup the row, call transformers' own torch function
(`raw`) and undo the regrouping, so that the mathematics stays upstream's:

    delta rule   documents of similar length become one right-padded batch; the padding is behind a causal
                 function, so it changes nothing. (Resetting the gate at boundaries instead would need no
                 regrouping, but its cumulative sums round: 2e-5 against 4e-8 on the gradient.)
    convolution  W - 1 zero columns between documents, which is what the start of a row has to its left.

Shapes: B rows, T tokens, N documents, H heads, K and V head widths, D channels, W taps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.models.packed.boundaries import bucket_plan, gap_plan


def gated_delta_rule(
    raw: Callable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    lengths: tuple[int, ...],
    **kwargs,
) -> tuple[Tensor, None]:
    """`raw` (transformers' torch_chunk_gated_delta_rule) on each document of a row by itself.

    query, key [1, T, H, K]; value [1, T, HV, V]; g (log decay), beta [1, T, HV]. Returns [1, T, HV, V], None.
    Errors: ValueError for a recurrent state, which several documents do not have in common.
    """
    refuse_state(lengths, **kwargs)
    buckets, inverse = bucket_plan(lengths, query.device)
    # token T is zero: it neither writes to the state nor decays it
    rows = [F.pad(x[0], (0, 0) * (x.dim() - 2) + (0, 1)) for x in (query, key, value, g, beta)]
    outputs = []
    for chunk, index in buckets:
        q, k, v, decay, rate = (x.index_select(0, index.flatten()).unflatten(0, index.shape) for x in rows)
        output, _ = raw(q, k, v, g=decay, beta=rate, chunk_size=chunk, **kwargs)
        outputs.append(output.flatten(0, 1))
    return torch.cat(outputs).index_select(0, inverse)[None], None


def refuse_state(
    lengths: tuple[int, ...], initial_state: Tensor | None = None, output_final_state: bool = False, **_
) -> None:
    """ValueError for a recurrent state in or out: several documents do not have one in common."""
    if initial_state is not None or output_final_state:
        raise ValueError(f"{len(lengths)} packed documents cannot share a recurrent state: use_cache=False")


def causal_conv1d(
    raw: Callable,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    lengths: tuple[int, ...],
) -> Tensor:
    """`raw` (transformers' torch causal_conv1d_fn) on each document of x [1, D, T] alone; weight [D, W]."""
    source, keep = gap_plan(lengths, weight.shape[-1] - 1, x.device)
    spread_TD = F.pad(x[0].t(), (0, 0, 0, 1)).index_select(0, source)
    output = raw(spread_TD.t()[None], weight, bias, activation=activation)
    return output[0].t().index_select(0, keep).t()[None]
