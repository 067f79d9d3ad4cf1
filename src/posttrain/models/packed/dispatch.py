"""Which kernel runs: replacements of transformers' functions that follow the device of their tensors.

A fused kernel on a GPU where one is installed, the reference of `kernels` elsewhere. Every architecture whose
layers look these functions up in its modeling module, and hand them the keyword arguments of the model call, is
handled; which do is found by looking (`layers.unreachable`) and proved by the probe.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.models.packed import kernels
from posttrain.models.packed.boundaries import BOUNDARIES, cumulative, document_index, documents

FUSED_ON = {"cuda"}  # device types with fused kernels; a test may add "cpu" to drive the other side
DISTRIBUTIONS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm"}
STATE, CONVOLUTION = "recurrent state", "convolution"  # the two things a layer can carry along a row

reached: ContextVar[Callable[[str], None] | None] = ContextVar("reached", default=None)  # set by the probe


@dataclass(frozen=True, slots=True)
class Operation:
    """A function of transformers' modeling modules."""

    name: str  # in reports
    package: str  # with the fused kernel
    carries: tuple[str, ...]  # what boundaries that arrive here keep apart; nothing where it runs one token
    replace: Callable[[Callable, Callable, Callable], Callable]  # (upstream, raw, kernel_for) -> replacement


def dispatch(function: str, upstream: Callable) -> Callable:
    """The replacement of transformers' module-level `function`, a key of `OPERATIONS`.

    Its attribute `kernel_for(device)` tells the fused kernel that runs there, None for torch.
    """
    operation, inner = OPERATIONS[function], upstream
    # The `kernels` package wraps functions in modules.
    if isinstance(inner, torch.nn.Module):
        inner = inspect.getclosurevars(type(inner).forward).nonlocals["func"]
    raw = inspect.unwrap(inner)
    bound = inspect.getclosurevars(inner).nonlocals.get("implementation") if inner is not raw else None
    fused = bound if bound is not raw else None

    def kernel_for(device: torch.device) -> Callable | None:
        if device.type not in FUSED_ON:
            return None
        return fused or (fla_convolution() if function == "causal_conv1d_fn" else None)

    replacement: Any = functools.wraps(raw)(operation.replace(upstream, raw, kernel_for))
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


def _take(kwargs: dict, rows: int, tokens: int, *carried: str) -> tuple[tuple[int, ...] | None, dict]:
    """The documents of this call, None if each row is one; and the keyword arguments that are no boundaries."""
    lengths = documents(kwargs, rows, tokens)
    if lengths is not None and (notice := reached.get()):
        for what in carried:
            notice(what)
    return lengths, {name: value for name, value in kwargs.items() if name not in BOUNDARIES}


def _cu_seqlens(lengths: tuple[int, ...], sent: Tensor | None, device: torch.device) -> dict[str, Tensor]:
    """What flash-linear-attention's kernels take; without the copy on the host they would ask the device."""
    # One of another length has empty documents.
    if sent is None or len(sent) != len(lengths) + 1:
        sent = cumulative(lengths, device)
    return {"cu_seqlens": sent, "cu_seqlens_cpu": cumulative(lengths, torch.device("cpu"))}


def _seq_idx(lengths: tuple[int, ...], sent: Tensor | None, device: torch.device) -> Tensor:
    return document_index(lengths, device) if sent is None else sent


def _delta_rule(upstream: Callable, raw: Callable, kernel_for: Callable) -> Callable:
    def packed_delta_rule(query, key, value, g, beta, **kwargs):
        sent = kwargs.get("cu_seqlens", kwargs.get("cu_seq_lens_q"))
        lengths, kwargs = _take(kwargs, *query.shape[:2], STATE)
        fused = kernel_for(query.device) is not None
        if lengths is None and fused:
            return upstream(query, key, value, g=g, beta=beta, **kwargs)
        if lengths is None:
            chunk = kernels.chunk_size(query.shape[1])
            return raw(query, key, value, g=g, beta=beta, chunk_size=chunk, **kwargs)
        if not fused:
            return kernels.delta_rule(raw, query, key, value, g, beta, lengths=lengths, **kwargs)
        kernels.refuse_state(lengths, **kwargs)
        where = _cu_seqlens(lengths, sent, query.device)
        return upstream(query, key, value, g=g, beta=beta, **where, **kwargs)

    return packed_delta_rule


def _scan(upstream: Callable, raw: Callable, kernel_for: Callable) -> Callable:
    def packed_scan(hidden_states, dt, A, B, C, chunk_size, **kwargs):
        seq_idx = kwargs.get("seq_idx")
        lengths, kwargs = _take(kwargs, *hidden_states.shape[:2], STATE)
        fused = kernel_for(hidden_states.device) is not None
        if lengths is None and fused:
            return upstream(hidden_states, dt, A, B, C, chunk_size=chunk_size, **kwargs)
        # With smaller chunks the result is the same, and the work within them is less.
        if lengths is None:
            chunk = kernels.chunk_size(hidden_states.shape[1], min(chunk_size, kernels.CHUNK))
            return raw(hidden_states, dt, A, B, C, chunk_size=chunk, **kwargs)
        if not fused:
            return kernels.state_space_scan(raw, hidden_states, dt, A, B, C, chunk_size, lengths, **kwargs)
        kernels.refuse_state(lengths, kwargs.get("initial_states"), kwargs.get("return_final_states", False))
        seq_idx = _seq_idx(lengths, seq_idx, hidden_states.device)
        return upstream(hidden_states, dt, A, B, C, chunk_size=chunk_size, seq_idx=seq_idx, **kwargs)

    return packed_scan


def _convolution_and_scan(upstream: Callable, raw: Callable, kernel_for: Callable) -> Callable:
    def packed_convolution_and_scan(zxbcdt, *args, **kwargs):
        if kernel_for(zxbcdt.device) is None:
            # It returns None, and the layer then calls convolution and scan by themselves.
            return raw(zxbcdt, *args, **kwargs)
        seq_idx = kwargs.get("seq_idx")
        lengths, kwargs = _take(kwargs, *zxbcdt.shape[:2], STATE, CONVOLUTION)
        if lengths is not None:
            kwargs["seq_idx"] = _seq_idx(lengths, seq_idx, zxbcdt.device)
        return upstream(zxbcdt, *args, **kwargs)

    return packed_convolution_and_scan


def _convolution(upstream: Callable, raw: Callable, kernel_for: Callable) -> Callable:
    def packed_causal_conv1d(hidden_states, weight, bias=None, activation=None, **kwargs):
        x_BDT, seq_idx, sent = hidden_states, kwargs.get("seq_idx"), kwargs.get("cu_seq_lens_q")
        lengths, _ = _take(kwargs, x_BDT.shape[0], x_BDT.shape[2], CONVOLUTION)
        fused = kernel_for(x_BDT.device)
        is_fla = fused is not None and fused.__module__.startswith("fla.")
        if fused is None or (is_fla and activation not in (None, "silu", "swish")):
            if lengths is None:
                return raw(x_BDT, weight, bias, activation=activation)
            return kernels.causal_conv1d(x_BDT, weight, bias, activation, lengths)
        if is_fla:
            where = {} if lengths is None else _cu_seqlens(lengths, sent, x_BDT.device)
            output_BTD, _ = fused(x_BDT.transpose(1, 2), weight, bias, activation=activation, **where)
            return output_BTD.transpose(1, 2)
        if lengths is None:
            return upstream(x_BDT, weight, bias, activation=activation)
        # causal-conv1d takes seq_idx only with the channels last.
        if x_BDT.stride(1) != 1:
            x_BDT = x_BDT.transpose(1, 2).contiguous().transpose(1, 2)
        seq_idx = _seq_idx(lengths, seq_idx, x_BDT.device)
        return upstream(x_BDT, weight, bias, activation=activation, seq_idx=seq_idx)

    return packed_causal_conv1d


def _decoding(upstream: Callable, raw: Callable, kernel_for: Callable) -> Callable:
    def one_step(first, *args, **kwargs):
        kwargs = {name: value for name, value in kwargs.items() if name not in BOUNDARIES}
        return (raw if kernel_for(first.device) is None else upstream)(first, *args, **kwargs)

    return one_step


FLA, SSM, CONV = "flash-linear-attention", "mamba-ssm", "causal-conv1d"
OPERATIONS = {
    "torch_chunk_gated_delta_rule": Operation("gated_delta_rule", FLA, (STATE,), _delta_rule),
    "torch_recurrent_gated_delta_rule": Operation("gated_delta_rule_step", FLA, (), _decoding),
    "chunk_kimi_delta_attention": Operation("kimi_delta_attention", FLA, (STATE,), _delta_rule),
    "recurrent_kimi_delta_attention": Operation("kimi_delta_attention_step", FLA, (), _decoding),
    "mamba2_chunk_scan": Operation("state_space_scan", SSM, (STATE,), _scan),
    "mamba2_split_conv1d_scan_combined": Operation("convolution_and_scan", SSM, (), _convolution_and_scan),
    "mamba2_selective_state_update": Operation("state_space_step", SSM, (), _decoding),
    "causal_conv1d_fn": Operation("causal_conv1d", CONV, (CONVOLUTION,), _convolution),
    "causal_conv1d_update": Operation("causal_conv1d_step", CONV, (), _decoding),
}
