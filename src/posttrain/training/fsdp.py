"""accelerate's FSDP2 plugin from the fsdp group, the sharding read back from the wrapped model, and collectives.

What torch keeps private of FSDP2 is touched in this file alone: `_get_fsdp_state`, `_fsdp_param_group`, `_is_root`,
`_reshard_after_forward`, `reset_iter_state` and `compute_local_shape_and_global_offset`, as they are in torch 2.11 to
2.13 (`reset_iter_state` from 2.13 on).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from posttrain.config import FSDPConf, Strategy, hybrid_shard_size
from posttrain.models.internals import layer_classes

Item = TypeVar("Item")


def make_accelerator(cfg: FSDPConf, model: PreTrainedModel, dtype: torch.dtype) -> Accelerator:
    """An Accelerator that shards `model` as `cfg.strategy` says. Parameters are fp32, compute is in `dtype`.

    The process group exists already (rank.py makes it).
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    state = PartialState(cpu=device == "cpu")
    mixed = "bf16" if dtype is torch.bfloat16 else "no"
    wide = torch.promote_types(dtype, torch.float32)
    if cfg.strategy is Strategy.no_shard:
        return Accelerator(cpu=device == "cpu", mixed_precision=mixed)

    # accelerate 1.15 slices its mesh in a way that torch 2.13 is about to drop; not the user's business.
    warnings.filterwarnings("ignore", message="Slicing a flattened dim", category=UserWarning)
    # accelerate 1.15 promotes MULTI_GPU to FSDP but not MULTI_CPU, which it runs as DDP without a word; after
    # this line it promotes by itself. Can go when `Accelerator(cpu=True, fsdp_plugin=...)` gives `is_fsdp2`.
    state.distributed_type = DistributedType.MULTI_GPU
    world = dist.get_world_size()
    mesh = ParallelismConfig(dp_shard_size=world) if world > 1 else None
    if cfg.strategy is Strategy.hybrid_shard:
        shard = hybrid_shard_size(cfg, world)
        mesh = ParallelismConfig(dp_replicate_size=world // shard, dp_shard_size=shard)
    accelerator = Accelerator(
        cpu=device == "cpu",
        parallelism_config=mesh,
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=cfg.strategy is not Strategy.shard_grad_op,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=layer_classes(model),
            # Gradients are reduced and the logits returned in fp32: bf16 there costs 7e-3 of the loss, this 3e-5.
            mixed_precision_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide, output_dtype=wide),
            state_dict_type="SHARDED_STATE_DICT",
        ),
    )
    if not accelerator.is_fsdp2:
        raise RuntimeError("accelerate did not start FSDP2: the run would silently be data parallel")
    return accelerator


def sharding(model: torch.nn.Module) -> str:
    """The strategy that the wrapped model really has, whatever the config says."""
    if isinstance(model, DistributedDataParallel):
        return Strategy.no_shard.value
    if not isinstance(model, FSDPModule):
        return "single process"
    groups = [group for module in _fsdp_modules(model) if (group := _group(module)) is not None]
    if any(group.mesh_info.mesh.ndim == 2 for group in groups):
        return Strategy.hybrid_shard.value
    # Under full_shard accelerate keeps the embedding's and the head's parameters after forward all the same.
    return (Strategy.full_shard if any(g._reshard_after_forward for g in groups) else Strategy.shard_grad_op).value


def _fsdp_modules(model: torch.nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _group(module: FSDPModule) -> Any:
    """The parameters that FSDP gathers and frees together with `module`; None if it has none of its own."""
    return module._get_fsdp_state()._fsdp_param_group


@contextlib.contextmanager
def gathered(model: torch.nn.Module) -> Iterator[PreTrainedModel]:
    """The bare model with whole parameters, for generation: one gather instead of one a layer and token.

    Ranks may run different numbers of forwards inside. `.unshard()` of the root covers only its own group, so
    every FSDP module is gathered; afterwards the next training step is exactly as if nothing had happened.
    """
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    if not isinstance(bare, PreTrainedModel):
        raise TypeError(f"a {type(bare).__name__} is no model of transformers, and cannot generate")
    modules = _fsdp_modules(bare)
    before = [(group := _group(module)) is not None and group._reshard_after_forward for module in modules]
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield bare
    finally:
        for module, value in zip(modules, before, strict=True):
            module.reshard()
            module.set_reshard_after_forward(value, recurse=False)


def share(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...], bool | None]:
    """What this rank holds of a tensor, where in the whole it begins, and whether it is this rank's to write.

    None: every rank holds the whole. Under hybrid_shard the first group writes.
    """
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim, None
    mesh, places = tensor.device_mesh, tensor.placements
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, places)
    coordinate = mesh.get_coordinate() or ()
    mine = all(place.is_shard() or at == 0 for place, at in zip(places, coordinate, strict=True))
    return tensor.to_local(), tuple(offsets), mine


def reshard(model: torch.nn.Module) -> None:
    """Free what FSDP has gathered: it would go on computing with it, and hides the shards behind it.

    After a forward without a backward that is the head, the norm before it and what the root holds; with
    shard_grad_op every layer.
    """
    for module in _fsdp_modules(model):
        module.reshard()


def give_up_forward(model: torch.nn.Module) -> None:
    """Say that a forward failed. To FSDP it is still under way: it would keep what it has gathered for the next one."""
    # A root is one from its first forward on.
    begun = isinstance(model, FSDPModule) and model._get_fsdp_state()._is_root
    reset = getattr(model, "reset_iter_state", None)
    if begun and reset is not None:
        reset()


def synchronise_gradients(
    model: torch.nn.Module, accelerator: Accelerator, last: bool
) -> contextlib.AbstractContextManager[None]:
    """Reduce gradients over ranks in the backward inside only if this is the step's last micro-batch."""
    return contextlib.nullcontext() if last else accelerator.no_sync(model)


def from_all_ranks(mine: list[Item]) -> list[Item]:
    """Every rank's items, in the order of ranks."""
    if dist.get_world_size() == 1:
        return mine
    shares: list[list[Item]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(shares, mine)
    return [item for share in shares for item in share]


def on_any_rank(true_here: bool) -> bool:
    """Is it true on some rank? A collective."""
    return bool(reduce_over_ranks({"": torch.tensor(float(true_here))}, dist.ReduceOp.MAX)[""])


def reduce_over_ranks(values: dict[str, torch.Tensor], op: dist.ReduceOp.RedOpType) -> dict[str, float]:
    """Scalars reduced over ranks, in fp64 and one collective. Every rank must hold the same names."""
    names = sorted(values)
    vector = torch.stack([values[name].detach().double() for name in names]).cpu()
    dist.all_reduce(vector, op)
    return dict(zip(names, vector.tolist(), strict=True))
