"""Several documents in one row, on models whose layers have memory.

transformers' internals are touched here and in packed/, and nowhere else.

    boundaries   the keyword arguments that mark where documents begin; they travel with the model call
    patch        makes the stateful layers honour them, with fused kernels on a GPU and plain torch elsewhere
    verify       proves by behaviour, at start, that no document of a row influences another

Why a patch. Symptom: on a bare CPU the layers raise (transformers 5.20 on), or ignore boundaries in silence
(5.15 to 5.19: logits off by 2.7 to 3.3 of 3.5); with triton and flash-linear-attention importable and no GPU
they die with "0 active drivers", because upstream chooses the kernel at import. From 5.15 on the layers look
the kernel up by its module-level name at each call, so replacing the name is enough; the replacement chooses
by the device of the tensors. It can go when upstream's torch functions take `cu_seqlens` and `seq_idx` and
follow the device.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import PreTrainedModel

from posttrain.errors import UserError
from posttrain.models import internals
from posttrain.models.packed import attention, dispatch
from posttrain.models.packed.boundaries import boundaries
from posttrain.models.packed.layers import carried, mixers, modeling_module, unreachable
from posttrain.models.packed.probe import WAY_OUT, PackingLeak, Probe
from posttrain.models.shrink import tiny_copy
from posttrain.models.thresholds import thresholds

__all__ = ["KernelReport", "PackingLeak", "PackingProof", "boundaries", "patch", "verify"]

SUPPORTED = (Version("5.15"), Version("6"))  # of transformers; older ones bind kernels to layer instances


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelReport:
    """What will run on the device of the computation."""

    layers: dict[str, int]  # stateful layer class -> how many; empty for attention only
    kernels: dict[str, str]  # operation -> the implementation by name
    warnings: list[str] = field(default_factory=list)  # slow fallbacks, and what to install


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingProof:
    """What the probe found. Differences are relative to the largest value of the tensor compared."""

    max_difference: float  # forward
    tolerance: float
    max_gradient_difference: float | None  # None where only the forward pass could be checked
    gradient_tolerance: float
    kernels: dict[str, str]
    layers: dict[str, int]  # class -> how many in the model: stateful and attention layers
    seconds: float
    warnings: list[str] = field(default_factory=list)


def patch(model: PreTrainedModel, device: torch.device | str | None = None, packed: bool = True) -> KernelReport:
    """Make the stateful layers of `model` honour `boundaries`, and choose kernels by device. Idempotent.

    Replaces module-level functions, so it holds for every model of the same classes in the process; a hook on
    `model` checks the boundaries of each call. `packed=False` (for packing=padded) chooses kernels and refuses
    no model.
    Errors: UserError for a transformers version, a layer class or hub kernels that cannot be made right.
    """
    version = Version(transformers.__version__)
    if not SUPPORTED[0] <= version < SUPPORTED[1]:
        raise UserError(
            f"transformers {version} is installed; the layers are patched for >={SUPPORTED[0]},<{SUPPORTED[1]}. "
            f"Type: pip install 'transformers>={SUPPORTED[0]},<{SUPPORTED[1]}'"
        )
    layers = carried(model)
    if packed:
        _refuse(model, layers)
        attention.install(model)
    for module in {modeling_module(layer) for layer in layers}:
        for name in dispatch.OPERATIONS.keys() & vars(module).keys():
            upstream = getattr(module, name)
            if not hasattr(upstream, "kernel_for"):
                setattr(module, name, dispatch.dispatch(name, upstream))
    kernels, warnings = _kernels_in_use(model, layers, _device(model, device), packed)
    return KernelReport(layers=_count(layers), kernels=kernels, warnings=warnings)


def _probed(probe: Probe, gradients: bool) -> tuple[float, float | None]:
    """The largest differences of forward and gradient, the probed model in eval mode."""
    if probe.packed:
        attention.install(probe.model)
    was_training = probe.model.training
    probe.model.eval()
    try:
        return probe.forward(), probe.gradients() if gradients else None
    finally:
        probe.model.train(was_training)


def _beyond(reached: dict[str, int], longest: float | None, packed: bool) -> PackingLeak:
    """What to say where documents leak only beyond a length."""
    name, tokens = min(reached.items(), key=lambda item: item[1])
    mode, what = ("thd", "rows") if packed else ("padded", "documents")
    reach = "of any length" if longest is None else f"of up to {longest:,.0f} tokens"
    budget = f"packing.tokens_per_row={tokens} at most, and " if packed else ""
    return PackingLeak(
        f"packing={mode} is right for {what} of up to {tokens:,} tokens, where this model computes something else "
        f"({name}={tokens}), and the run makes {what} {reach}: type {budget}task.max_prompt_tokens and "
        f"rollout.max_new_tokens of at most {tokens} together"
    )


def _refuse(model: PreTrainedModel, layers: dict[nn.Module, set[str]]) -> None:
    """UserError where boundaries would not reach a stateful layer."""
    for layer, carries in layers.items():
        if what := unreachable(layer, carries):
            raise UserError(
                f"packing=thd is not possible with {type(model).__name__}: the {' and '.join(sorted(what))} of "
                f"its {type(layer).__name__} cannot be kept within one document of a row. {WAY_OUT}"
            )
    if internals.is_compiled(model):
        raise UserError(
            f"packing=thd is not possible with a compiled model: it may hold kernels from before the patch. "
            f"Compile it afterwards, or: {WAY_OUT}"
        )
    if layers and getattr(model, "use_kernels", False):
        raise UserError(
            "packing=thd is not possible with use_kernels=True: hub kernels replace "
            f"{type(next(iter(layers))).__name__} as a whole. Load the model without it, or: {WAY_OUT}"
        )


def _count(layers: Iterable[nn.Module]) -> dict[str, int]:
    return dict(Counter(type(layer).__name__ for layer in layers))


def _device(model: PreTrainedModel, device: torch.device | str | None) -> torch.device:
    return next(model.parameters()).device if device is None else torch.device(device)


def _kernels_in_use(
    model: PreTrainedModel, layers: Iterable[nn.Module], device: torch.device, packed: bool
) -> tuple[dict[str, str], list[str]]:
    """Names of the implementations on `device`, and what to install where one is a slow one."""
    kernels, warnings = {}, []
    for module in {modeling_module(layer) for layer in layers}:
        for name, operation in dispatch.OPERATIONS.items():
            if operation.carries and hasattr(module, name):
                kernel = getattr(module, name).kernel_for(device)
                kernels[operation.name] = dispatch.describe(kernel)
                if kernel is None and device.type != "cpu":
                    warnings.append(
                        f"{operation.name} runs its slow reference on {device.type}: pip install {operation.package}"
                    )
    kernels["attention"] = attention.describe(model, packed)
    if any(name.endswith("experts") for name, _ in model.named_modules()):
        kernels["experts"] = internals.experts_in_use(model.config)
    return kernels, warnings


def verify(
    model: PreTrainedModel,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    longest: float | None = None,
    packed: bool = True,
) -> PackingProof:
    """Prove on a tiny copy of `model` that a packed row equals its documents alone. Call after `patch`.

    The copy has the model's layer classes and head widths, one layer of each kind and slow decay; it lives on
    `device` and in `dtype` (of the computation; by default the parameters' own). Checked: (a) each layer's
    output and the logits of a packed row against each document alone; (b) that they stay when every other
    document is replaced; (c) the gradient, which must equal the separate one and reach no other document;
    (d) that one long document gives the same before and after packed rows.
    An architecture that cannot be copied small is probed itself, forward only. The global RNG is left alone.
    Where rows of `longest` tokens (None: of any length) cross a length at which the model computes something else, the
    same is checked on a copy that does so among the probe's documents.
    `packed=False` (for packing=padded) checks documents side by side, padded on the right.
    Errors: PackingLeak, one line that names the layer class at fault.
    """
    started = time.perf_counter()
    device = _device(model, device)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        small = tiny_copy(model, device, dtype or next(model.parameters()).dtype)
        probe = Probe(model if small is None else small, packed)
        forward, gradients = _probed(probe, small is not None)
        limits = thresholds(model.config.get_text_config(decoder=True))
        reached = {name: tokens for name, tokens in limits.items() if longest is None or longest > tokens}
        crossing = tiny_copy(model, device, probe.dtype, crossing=True) if reached else None
        if crossing is not None:
            try:
                _probed(Probe(crossing, packed), True)
            except PackingLeak as leak:
                raise _beyond(reached, longest, packed) from leak
    kernels, warnings = _kernels_in_use(model, carried(model), device, packed)
    if small is None:
        warnings.append(
            f"{type(model).__name__} has no tiny copy: packing was verified on the model itself, forward only, in "
            f"{probe.ids_T.device.type} {next(model.parameters()).dtype}, with its own decay"
        )
    return PackingProof(
        max_difference=forward,
        tolerance=probe.tolerance,
        max_gradient_difference=gradients,
        gradient_tolerance=probe.gradient_tolerance,
        kernels=kernels,
        layers=_count(mixers(model)),
        seconds=time.perf_counter() - started,
        warnings=warnings,
    )
