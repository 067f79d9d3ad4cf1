"""Which kernel runs: replacements of transformers' functions that follow the device of their tensors.

A fused kernel on a GPU where one is installed, the reference of `kernels` elsewhere.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from posttrain.models.packed.boundaries import BOUNDARIES, chunk_size, cumulative, document_index, documents
from posttrain.models.packed.kernels import causal_conv1d, gated_delta_rule, refuse_state

FUSED_ON = {"cuda"}  # device types with fused kernels; a test may add "cpu" to drive the other side
DISTRIBUTIONS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d"}


def dispatch(name: str, upstream: Callable) -> Callable:
    """The replacement of transformers' module-level function `name`, a key of `DISPATCHERS`.

    Its attribute `kernel_for(device)` tells the fused kernel that runs there, None for torch.
    """
    inner = upstream
    if isinstance(inner, torch.nn.Module):  # the `kernels` package wraps functions in modules
        inner = inspect.getclosurevars(type(inner).forward).nonlocals["func"]
    raw = inspect.unwrap(inner)
    bound = inspect.getclosurevars(inner).nonlocals.get("implementation") if inner is not raw else None
    fused = bound if bound is not raw else None

    def kernel_for(device: torch.device) -> Callable | None:
        if device.type not in FUSED_ON:
            return None
        return fused or (fla_convolution() if name == "causal_conv1d_fn" else None)

    replacement = DISPATCHERS[name](upstream, raw, kernel_for)
    replacement.kernel_for = kernel_for
    return replacement


@functools.cache
def fla_convolution() -> Callable | None:
    """flash-linear-attention's Triton convolution, for GPUs without causal-conv1d. Slow to import."""
    try:
        from fla.modules.causal_conv1d import causal_conv1d as convolution
    except ImportError:
        return None
    return convolution


def describe(kernel: Callable | None) -> str:
    """Package, version and function of a kernel that `kernel_for` returned."""
    if kernel is None:
        return "reference (torch)"
    package = kernel.__module__.partition(".")[0]
    distribution = DISTRIBUTIONS.get(package, package)
    try:
        distribution += " " + importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        distribution += " (no version)"
    return f"{distribution} {kernel.__name__}"


def _cu_seqlens(lengths: tuple[int, ...], sent: Tensor | None, device: torch.device) -> dict[str, Tensor]:
    """What flash-linear-attention's kernels take; without the copy on the host they would ask the device."""
    same = sent is not None and len(sent) == len(lengths) + 1  # else it has empty documents
    return {
        "cu_seqlens": sent if same else cumulative(lengths, device),
        "cu_seqlens_cpu": cumulative(lengths, torch.device("cpu")),
    }


def _delta_rule(upstream: Callable, raw: Callable, kernel_for: Callable) -> Callable:
    @functools.wraps(raw)
    def packed_gated_delta_rule(query, key, value, g, beta, **kwargs):
        lengths = documents(kwargs, *query.shape[:2])
        sent = kwargs.get("cu_seqlens")
        kwargs = {name: kwargs[name] for name in kwargs if name not in BOUNDARIES}
        fused = kernel_for(query.device) is not None
        if lengths is None and fused:
            return upstream(query, key, value, g=g, beta=beta, **kwargs)
        if lengths is None:
            return raw(query, key, value, g=g, beta=beta, chunk_size=chunk_size(query.shape[1]), **kwargs)
        if not fused:
            return gated_delta_rule(raw, query, key, value, g, beta, lengths=lengths, **kwargs)
        refuse_state(lengths, **kwargs)
        where = _cu_seqlens(lengths, sent, query.device)
        return upstream(query, key, value, g=g, beta=beta, **where, **kwargs)

    return packed_gated_delta_rule


def _convolution(upstream: Callable, raw: Callable, kernel_for: Callable) -> Callable:
    @functools.wraps(raw)
    def packed_causal_conv1d(hidden_states, weight, bias=None, activation=None, **kwargs):
        x_BDT = hidden_states
        lengths = documents(kwargs, x_BDT.shape[0], x_BDT.shape[2])
        fused = kernel_for(x_BDT.device)
        is_fla = fused is not None and fused.__module__.startswith("fla.")
        if fused is None or (is_fla and activation not in (None, "silu", "swish")):
            if lengths is None:
                return raw(x_BDT, weight, bias, activation=activation)
            return causal_conv1d(raw, x_BDT, weight, bias, activation, lengths)
        if is_fla:
            where = {} if lengths is None else _cu_seqlens(lengths, kwargs.get("cu_seq_lens_q"), x_BDT.device)
            output_BTD, _ = fused(x_BDT.transpose(1, 2), weight, bias, activation=activation, **where)
            return output_BTD.transpose(1, 2)
        if lengths is None:
            return upstream(x_BDT, weight, bias, activation=activation)
        if x_BDT.stride(1) != 1:  # causal-conv1d takes seq_idx only with the channels last
            x_BDT = x_BDT.transpose(1, 2).contiguous().transpose(1, 2)
        seq_idx = kwargs.get("seq_idx")
        seq_idx = document_index(lengths, x_BDT.device) if seq_idx is None else seq_idx
        return upstream(x_BDT, weight, bias, activation=activation, seq_idx=seq_idx)

    return packed_causal_conv1d


def _decoding(upstream: Callable, raw: Callable, kernel_for: Callable) -> Callable:
    @functools.wraps(raw)
    def one_step(first, *args, **kwargs):
        kwargs = {name: kwargs[name] for name in kwargs if name not in BOUNDARIES}
        return (raw if kernel_for(first.device) is None else upstream)(first, *args, **kwargs)

    return one_step


DISPATCHERS = {
    "torch_chunk_gated_delta_rule": _delta_rule,
    "torch_recurrent_gated_delta_rule": _decoding,
    "causal_conv1d_fn": _convolution,
    "causal_conv1d_update": _decoding,
}
