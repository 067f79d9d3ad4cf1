"""The frozen reference policy of the KL penalty, without a second model.

The reference is a copy of this rank's shard of every trained parameter (`requires_grad`), taken before anything is
trained. For the reference's forward passes the copies change places with the policy's weights, inside the policy's own
modules, and afterwards back. So the reference

- is sharded exactly as the policy is: full_shard, shard_grad_op, hybrid_shard, DDP and one process;
- costs one copy of the trained shards, on the same device or on the CPU (algorithm.kl.reference), and one parameter
  more while they change places; no gradients, no optimizer state, no gather but in its forward passes;
- is, under an adapter, the base model at the cost of a copy of the adapter alone: the base weights are frozen and
  therefore shared, and an adapter as it starts adds nothing (LoRA, arXiv:2106.09685: B = 0);
- has the kernels, dtypes and packing of the policy, so before the first optimizer step the two agree bitwise.

Buffers are not parameters: policy and reference share them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from posttrain.config.algorithm import KLConf, ReferenceDevice
from posttrain.training.fsdp import give_up_forward, reshard


def make_reference(model: torch.nn.Module, cfg: KLConf) -> Reference | None:
    """The policy as it is now, for `cfg.coefficient` times the KL divergence from it; None, and no copy, if that is 0.

    `model` is what accelerator.prepare returned, and no checkpoint is loaded into it yet: a reference that never moves
    is the model that the run started from, also after a resume.
    """
    return Reference(model, cfg.reference) if cfg.coefficient else None


class Reference:
    """The reference's weights, and whether they have `moved` away from the model that the run started from."""

    def __init__(self, model: torch.nn.Module, device: ReferenceDevice) -> None:
        self.moved = False
        self._in_place = False
        reshard(model)
        self._shards = [_copy(shard(parameter), device) for parameter in trained(model).values()]

    @contextlib.contextmanager
    def in_place(self, model: torch.nn.Module) -> Iterator[None]:
        """Inside, `model` is the reference, without gradients; afterwards the policy, bitwise, also after an exception.

        The optimizer's state, gradients and the identity of every parameter and its storage stay. Inside, every rank
        runs as many forwards as the others, or all run theirs in fsdp.gathered. Not between a forward and its backward,
        which would be of other weights.

        Raises:
            RuntimeError: the reference is in place already.
        """
        self._policy_must_be_in_place()
        reshard(model)
        parameters = list(trained(model).values())
        self._swap(parameters)
        self._in_place = True
        try:
            with torch.no_grad():
                yield
        except BaseException:
            give_up_forward(model)
            raise
        finally:
            reshard(model)
            self._swap(parameters)
            self._in_place = False

    def refresh(self, model: torch.nn.Module, mix: float) -> None:
        """reference <- (1 - mix) * reference + mix * policy: TR-DPO (arXiv:2404.09656), its soft update.

        With mix 1, its hard update, the reference becomes the policy exactly.

        Raises:
            RuntimeError: the reference is in place.
        """
        self._policy_must_be_in_place()
        reshard(model)
        for parameter, kept in zip(trained(model).values(), self._shards, strict=True):
            kept.lerp_(shard(parameter).to(kept.device), mix)
        self.moved = True

    def _swap(self, parameters: list[torch.nn.Parameter]) -> None:
        """Pairwise and in place: FSDP and the optimizer hold on to the parameters' storage."""
        for parameter, kept in zip(parameters, self._shards, strict=True):
            here = shard(parameter)
            was_here = here.clone()
            here.copy_(kept)
            kept.copy_(was_here)
        torch.clear_autocast_cache()  # inside autocast it holds bf16 copies of the weights that were here

    def _policy_must_be_in_place(self) -> None:
        if self._in_place:
            raise RuntimeError("the reference is in place already: leave its `with` block first")


def trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The trained parameters by their names in the bare model, tied ones once."""
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    return {name: parameter for name, parameter in bare.named_parameters() if parameter.requires_grad}


def shard(parameter: torch.nn.Parameter) -> torch.Tensor:
    """What this rank holds of a parameter, without gradient: the same storage, whole where nothing is sharded."""
    tensor = parameter.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copy(tensor: torch.Tensor, device: ReferenceDevice) -> torch.Tensor:
    """On the CPU pinned if `tensor` is on a GPU: other memory goes there and back through a buffer of the driver."""
    if device is ReferenceDevice.sharded:
        return tensor.clone()
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)
