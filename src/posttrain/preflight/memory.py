"""Memory of one rank by phase, before a GPU is rented: what is held is counted, what a forward saves is measured.

Held, in bytes a parameter: fp32 weights 4, gradients 4, AdamW's two averages 8, a reference policy 4 (its trained
parameters). Each rank holds its shard of them, DDP holds all of them and a second copy of the gradients in its buckets
(accelerate's default). A gathered parameter is one in the dtype of the computation. Activations and the sampler's cache
are what forwards of the model itself leave behind on the CPU, on two lengths, as a line in the number of tokens.

An estimate: allocators fragment, and fused kernels save less than the references that run on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from posttrain.config import GRPOConf, ModelConf, Strategy, hybrid_shard_size
from posttrain.config.algorithm import ReferenceDevice
from posttrain.errors import UserError
from posttrain.flops.counter import takes_logits_to_keep
from posttrain.logprobs import CHUNK_BYTES
from posttrain.models.configs import load_config
from posttrain.models.gdn_packing import boundaries
from posttrain.models.internals import from_config, layer_classes

MASTER, GRADIENT, ADAM = 4, 4, 8
# Tokens of the two forwards: documents of whole chunks, which the delta rule works in.
SHORT, LONG = 128, 384


@dataclass(frozen=True, slots=True)
class Line:
    """Bytes as a function of tokens."""

    fixed: float
    each: float  # a token

    def __call__(self, tokens: int) -> float:
        return self.fixed + self.each * tokens


def of_a_rank(model: PreTrainedModel, cfg: GRPOConf, ranks: int, width: int, longest: int) -> dict[str, dict[str, int]]:
    """Phase -> what -> bytes on one of `ranks` ranks. `model` is bare, in fp32 on the CPU.

    Args:
        width: bytes of a number in the computation, 2 for bf16.
        longest: tokens of the longest sequence, prompt and completion.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    shards = _shards(cfg, ranks)
    held = {
        "weights": MASTER * parameters / shards,
        "AdamW's averages": ADAM * trained / shards,
    }
    if cfg.algorithm.kl.coefficient and cfg.algorithm.kl.reference is ReferenceDevice.sharded:
        held["reference policy"] = MASTER * trained / shards
    alone = cfg.fsdp.strategy is Strategy.no_shard
    layers = [
        sum(parameter.numel() for parameter in module.parameters())
        for module in model.modules()
        if type(module).__name__ in layer_classes(model)
    ]
    # FSDP gathers a layer while it still computes with the one before; the head and the embedding stay gathered.
    outside = parameters - sum(layers)
    at_once = parameters if cfg.fsdp.strategy is Strategy.shard_grad_op else 2 * max(layers, default=0) + outside
    # DDP computes with its own weights; autocast keeps a cast copy of each matrix.
    copy = width * parameters if width < MASTER else 0
    saved, cache = activations(model), sampler_cache(model)
    scale = width / MASTER
    tokens = max(cfg.packing.tokens_per_row, longest)
    sequences = max(cfg.rollout.batch_size, cfg.rollout.group_size)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    rollout = {
        "gathered weights": copy if alone else width * parameters,
        "cache": sequences * cache(longest) * scale,
        # In fp32, in fp64 and cumulated.
        "logits": sequences * vocabulary * (4 + 4 + 8 + 8),
    }
    update = {
        "gradients": GRADIENT * trained * (2 if alone and ranks > 1 else 1) / shards,
        "gathered weights": copy if alone else width * at_once,
        "whole gradients of a layer": 0 if alone else 4 * max(layers, default=0),
        "activations": saved(tokens) * scale,
        "logits of a chunk": 3 * CHUNK_BYTES,
    }
    return {
        phase: {what: round(size) for what, size in {**held, **own}.items() if size}
        for phase, own in (("rollout", rollout), ("update", update))
    }


def _shards(cfg: GRPOConf, ranks: int) -> int:
    if cfg.fsdp.strategy is Strategy.no_shard:
        return 1
    return hybrid_shard_size(cfg.fsdp, ranks) if cfg.fsdp.strategy is Strategy.hybrid_shard else ranks


def activations(model: PreTrainedModel) -> Line:
    """Bytes that a packed forward of `model` keeps for its backward, without the weights, as a line in its tokens.

    Where layers are recomputed, what one of them then keeps is added: of one layer at a time.
    """
    kept = _kept(model)
    # torch types a module's attributes as tensors and modules.
    recomputed: list[Any] = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    if not recomputed:
        return kept
    for module in recomputed:
        module.gradient_checkpointing = False
    try:
        everything = _kept(model)
    finally:
        for module in recomputed:
            module.gradient_checkpointing = True
    layers = len(recomputed)
    return Line(kept.fixed + everything.fixed / layers, kept.each + everything.each / layers)


def _kept(model: PreTrainedModel) -> Line:
    sizes = []
    one_logit = {"logits_to_keep": 1} if takes_logits_to_keep(model) else {}
    for tokens in (SHORT, LONG):
        kept: dict[int, int] = {}
        weights = {storage(parameter) for parameter in model.parameters()}

        def keep(tensor: torch.Tensor, kept: dict[int, int] = kept, weights: set[int] = weights) -> torch.Tensor:
            # Views of one storage are held once.
            if storage(tensor) not in weights:
                kept[storage(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        ids_BT = torch.zeros(1, tokens, dtype=torch.long)
        inputs = boundaries((tokens // 2, tokens - tokens // 2), "cpu")
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            # The tensors live as long as the output does: no storage is counted twice under a new address.
            output = model(input_ids=ids_BT, **inputs, **one_logit)
            sizes.append(sum(kept.values()))
            del output
    return _line(sizes)


@torch.no_grad()
def sampler_cache(model: PreTrainedModel) -> Line:
    """Bytes of one sequence's cache, as a line in its tokens."""
    sizes = []
    for tokens in (SHORT, LONG):
        ids_BT = torch.zeros(1, tokens, dtype=torch.long)
        cache = model(input_ids=ids_BT, use_cache=True).past_key_values
        sizes.append(sum({storage(t): t.untyped_storage().nbytes() for t in _tensors(cache, set())}.values()))
    return _line(sizes)


def _line(sizes: list[int]) -> Line:
    each = (sizes[1] - sizes[0]) / (LONG - SHORT)
    return Line(max(0.0, sizes[0] - each * SHORT), each)


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(holder: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """The tensors that an object holds: caches are of many kinds, with layers in lists and states in attributes."""
    if id(holder) in seen or isinstance(holder, nn.Module):
        return
    seen.add(id(holder))
    if isinstance(holder, torch.Tensor):
        yield holder
    elif isinstance(holder, dict):
        for value in holder.values():
            yield from _tensors(value, seen)
    elif isinstance(holder, list | tuple):
        for value in holder:
            yield from _tensors(value, seen)
    elif hasattr(holder, "__dict__"):
        yield from _tensors(vars(holder), seen)


def of_this_device() -> float:
    """Bytes of memory that a rank may use here: of the GPU, or what the machine has available."""
    if torch.cuda.is_available():
        return float(torch.cuda.mem_get_info()[1])
    return of_this_machine()


def of_this_machine() -> float:
    """Bytes of the machine's memory that are available now. Without /proc (macOS) there is no limit that is known."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = dict(line.split(":", 1) for line in lines)
    except OSError:
        return float("inf")
    return 1024.0 * int(found["MemAvailable"].split()[0])


def parameters_that_fit(cfg: ModelConf) -> int:
    """How many parameters the model has. Raises UserError if its fp32 weights exceed this machine's memory."""
    with torch.device("meta"):
        model = from_config(load_config(cfg), trust_remote_code=cfg.trust_remote_code)
    count = sum(parameter.numel() for parameter in model.parameters())
    needed, available = MASTER * count, of_this_machine()
    if needed > available:
        raise UserError(
            f"{count:,} parameters need {needed / 1e9:.1f} GB in fp32, and this machine has {available / 1e9:.1f} GB "
            "left: the model's own parts of the preflight need a larger machine"
        )
    return count


def way_out(phase: str, most: str) -> str:
    """What to type where a phase does not fit, by what is largest in it."""
    return {
        "cache": "a smaller rollout.batch_size samples fewer sequences at once",
        "logits": "a smaller rollout.batch_size samples fewer sequences at once",
        "activations": "a smaller packing.tokens_per_row, or model.gradient_checkpointing=true",
        "reference policy": "algorithm.kl.reference=cpu",
    }.get(most, "more ranks (launch.nproc=) with fsdp=full_shard")
