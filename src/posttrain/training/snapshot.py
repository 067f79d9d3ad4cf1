"""What a checkpoint holds: a copy of this rank's share of the tensors, and the generator states. No pickle.

The tensors are those of the model, of the optimizer and of a reference policy that has moved, as `model.<name>`,
`optimizer.<name>.<state>` and `reference.<name>`. Each rank writes its share as one safetensors file, in the layout
that torch's distributed checkpoint reads (`HuggingFaceStorageReader`), on any number of ranks and for any sharding.
Learning rate, data order and sampling noise are functions of seed and step, and need no state.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as distributed_checkpoint
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.nn.parallel import DistributedDataParallel

from posttrain.training.fsdp import reshard, share
from posttrain.training.reference import Reference, trained

# Of torch's distributed checkpoint: where in the whole tensor each share begins (torch 2.9 to 2.13).
SHARDING, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One rank's share at one moment, on the CPU: training may go on while it is written."""

    tensors: dict[str, torch.Tensor]
    offsets: dict[str, tuple[int, ...]]  # of each tensor within the whole one
    generators: dict[str, Any]

    def write(self, tensors: Path, generators: Path) -> None:
        """One safetensors file and one JSON file."""
        begins = {name: {OFFSETS: list(offsets)} for name, offsets in self.offsets.items()}
        save_file(self.tensors, tensors, metadata={"format": "pt", SHARDING: json.dumps(begins)})
        generators.write_text(json.dumps(self.generators), encoding="utf-8")
        # safetensors lets nobody but the owner read its file.
        tensors.chmod(generators.stat().st_mode)

    def check(self, tensors: Path) -> None:
        """Raises OSError where the file that was written gives back other values than these."""
        try:
            with safe_open(tensors, framework="pt") as file:
                same = set(file.keys()) == self.tensors.keys() and all(
                    torch.equal(file.get_tensor(name).view(torch.uint8), tensor.view(torch.uint8))
                    for name, tensor in self.tensors.items()
                )
        except (SafetensorError, ValueError):
            same = False
        if not same:
            raise OSError(f"{tensors} reads otherwise than it was written: look at the disk")


def snapshot(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    reference: Reference | None,
    generators: dict[str, Any],
) -> Snapshot:
    """This rank's share of the state now. The reference is part of it once it has moved."""
    taken = Snapshot(tensors={}, offsets={}, generators=generators)
    reshard(model)
    _take(taken, {**_model(model), **_optimizer(model, optimizer)})
    if reference is not None and reference.moved:
        with reference.in_place(model):
            _take(taken, _reference(model))
    return taken


def restore(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, reference: Reference | None
) -> bool:
    """Read every rank's share of a checkpoint into place; does it hold a reference that has moved? A collective."""
    reshard(model)
    reader = HuggingFaceStorageReader(str(folder))
    held = reader.read_metadata().state_dict_metadata.items()
    shapes = {name: tuple(entry.size) for name, entry in held if isinstance(entry, TensorStorageMetadata)}
    _make_states(shapes, model, optimizer)
    _read(folder, _model(model))
    _read(folder, _optimizer(model, optimizer))
    moved = any(name.startswith("reference.") for name in shapes)
    if moved and reference is not None:
        with reference.in_place(model):
            _read(folder, _reference(model))
        reference.moved = True
    return moved


def generator_states() -> dict[str, Any]:
    """The states of every global generator that a task, a reward or a sampler may draw from, as JSON holds them."""
    version, state, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": [version, list(state), gauss],
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": _text(torch.get_rng_state()),
        "cuda": _text(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
    }


def set_generator_states(states: dict[str, Any]) -> None:
    """Raises KeyError, TypeError or ValueError for anything but what `generator_states` returned."""
    version, state, gauss = states["python"]
    random.setstate((version, tuple(state), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_bytes(states["torch"]))
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(states["cuda"]))


def _take(taken: Snapshot, tensors: dict[str, torch.Tensor]) -> None:
    """Copy this rank's part: of a sharded tensor its shard, of the others each rank writes some."""
    ranks, me = dist.get_world_size(), dist.get_rank()
    for number, (name, tensor) in enumerate(tensors.items()):
        local, offsets, mine = share(tensor)
        if mine is None:
            mine = number % ranks == me
        if mine and local.numel():
            taken.tensors[name] = local.detach().to("cpu", copy=True).contiguous()
            taken.offsets[name] = offsets


def _read(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """In place, and in torch's own words where a tensor is missing or has another shape."""
    distributed_checkpoint.load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)))


def _model(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, tied ones once, and the buffers that a state dict has."""
    bare = _bare(model)
    parameters = {name: parameter.detach() for name, parameter in bare.named_parameters()}
    buffers = {name for name, _ in bare.named_buffers()} & bare.state_dict().keys()
    return {f"model.{name}": tensor for name, tensor in parameters.items()} | {
        f"model.{name}": buffer for name, buffer in bare.named_buffers() if name in buffers
    }


def _optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The states that there are: a parameter without a gradient so far has none. Scalars as one-element vectors."""
    return {
        f"optimizer.{name}.{key}": value if value.ndim else value[None]
        for name, parameter in _bare(model).named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _make_states(shapes: dict[str, tuple[int, ...]], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Room in the optimizer for the states that a checkpoint has, and no other."""
    parameters = dict(_bare(model).named_parameters())
    on_device = {id(p) for group in optimizer.param_groups if _scalars_on_device(group) for p in group["params"]}
    optimizer.state.clear()
    for name, parameter, key in _states(shapes, parameters):
        whole = shapes[name] == tuple(parameter.shape) and (key != "step")
        device = parameter.device if id(parameter) in on_device else "cpu"
        room = torch.zeros_like(parameter) if whole else torch.zeros((), dtype=torch.float32, device=device)
        optimizer.state[parameter][key] = room.detach()


def _states(
    shapes: dict[str, tuple[int, ...]], parameters: dict[str, torch.nn.Parameter]
) -> Iterator[tuple[str, torch.nn.Parameter, str]]:
    for name in shapes:
        kind, _, rest = name.partition(".")
        owner, _, key = rest.rpartition(".")
        if kind == "optimizer" and owner in parameters:
            yield name, parameters[owner], key


def _scalars_on_device(group: dict[str, Any]) -> bool:
    return bool(group.get("capturable") or group.get("fused"))


def _reference(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Inside `reference.in_place(model)`."""
    return {f"reference.{name}": parameter.detach() for name, parameter in trained(model).items()}


def _bare(model: torch.nn.Module) -> torch.nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
