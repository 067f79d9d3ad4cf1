"""A model's head: the layer that makes logits, what becomes of them after it, and how to run another in its place.

Shape suffixes: B rows, T positions, K of them that predict; V vocabulary; X the last dimension of whatever is cut.
"""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.models.shrink import tiny_copy


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Logits are f(x) of the output x of `linear`: f(x) = scale x, or cap tanh(scale x / cap)."""

    linear: nn.Linear | None  # None: logits come from the model only, all [B, K, V] of them
    scale: float = 1.0
    cap: float | None = None
    description: str


@torch.enable_grad()
def find_head(model: PreTrainedModel) -> Head:
    """The head of `model`, and what the model does to logits after it. Call before sharding, after gdn_packing.patch.

    Found by behaviour: the model's own `forward` runs with the layers of a tiny copy and a head that returns known
    values; what comes out as logits says what became of them. No weight of the model is touched. Where that is neither
    a scale nor a tanh cap, `linear` is None and `description` says why. The global RNG is left alone.
    """
    name, linear = type(model).__name__, model.get_output_embeddings()
    if type(linear) is not nn.Linear or "forward" in vars(linear) or linear._forward_hooks or linear._forward_pre_hooks:
        return Head(linear=None, description=f"full logits: the head of {name} is no plain linear layer")
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        small = tiny_copy(model, torch.device("cpu"), torch.float32)
        known_BKV = torch.empty(1, 3, linear.out_features, dtype=torch.float64).uniform_(-60, 60)
    if small is None:
        return Head(linear=None, description=f"full logits: {name} has no tiny copy that could be tried")
    # The first column shows the slope, the second what lies beyond a cap.
    known_BKV[..., 0], known_BKV[..., 1] = 1e-4, 1e6
    try:
        # Flash attention would need a GPU.
        small.eval().set_attn_implementation("eager")
        logits_BKV, zeros_BK2 = _after_head(model, small, linear, known_BKV), torch.zeros(1, 3, 2, requires_grad=True)
        slope, far = (logits_BKV[0, 0, :2].double() / known_BKV[0, 0, :2]).tolist()
        scale, cap = (slope, far * 1e6) if abs(far) < abs(slope) / 2 else (far, None)
        expected_BKV = known_BKV * scale if cap is None else cap * (known_BKV * scale / cap).tanh()
        after_BK2 = _after_head(model, small, linear, zeros_BK2)
        (gradient_BK2,) = torch.autograd.grad(after_BK2.sum(), zeros_BK2)
    # Any code may come after a head. Full logits are right whatever it does.
    except Exception as error:
        reason = textwrap.shorten(f"{name} could not be tried with another head: {error}", 200)
        return Head(linear=None, description=f"full logits: {reason}")
    same = torch.allclose(logits_BKV.double(), expected_BKV, rtol=1e-5, atol=0)
    if not scale or not same or after_BK2.any() or not torch.allclose(gradient_BK2, torch.tensor(scale), rtol=1e-5):
        return Head(linear=None, description=f"full logits: {name} changes them after its head")
    scale, cap = float(f"{scale:.7g}"), cap and float(f"{cap:.7g}")
    words = "by chunks of the vocabulary" + (f", scale {scale:g}" if scale != 1 else "")
    words += f", tanh cap {cap:g}" if cap else ""
    return Head(linear=linear, scale=scale, cap=cap, description=words)


def _after_head(model: PreTrainedModel, small: PreTrainedModel, linear: nn.Linear, output_BKV: Tensor) -> Tensor:
    """The logits of `model` with the layers of `small` and a head that returns `output_BKV`."""
    ids_1T, kept_K = torch.arange(1, 6)[None], torch.tensor([1, 3, 4])
    calls: list[Tensor] = []

    def head(hidden_BTD: Tensor) -> Tensor:
        calls.append(at_positions(hidden_BTD, kept_K))
        return output_BKV

    modules = {name: module for name, module in model.named_modules() if name}
    path = next(name for name, module in modules.items() if module is linear)
    forwards: dict[nn.Module, Callable] = {linear: head}
    # The modules that hold the head keep their own forward, and so does XLM's gelu, which all layers share.
    for name, copy in small.named_modules():
        if name in modules and not f"{path}.".startswith(f"{name}.") and modules[name] is not copy:
            forwards[modules[name]] = copy.__call__
    with forwards_replaced(forwards):
        logits_BKV = model(input_ids=ids_1T, logits_to_keep=kept_K, use_cache=False).logits
    if len(calls) != 1 or logits_BKV.shape != output_BKV.shape:
        raise ValueError(f"{len(calls)} calls, and {list(output_BKV.shape)} became {list(logits_BKV.shape)}")
    return logits_BKV


def at_positions(values_BTX: Tensor, kept_K: Tensor) -> Tensor:
    """[B, K, X], also of a model that does not know logits_to_keep and has all positions."""
    return values_BTX if values_BTX.shape[1] == len(kept_K) else values_BTX[:, kept_K]


@contextlib.contextmanager
def forwards_replaced(forwards: dict[nn.Module, Callable]) -> Iterator[None]:
    """Each module's `forward` is another function inside."""
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in forwards:
            del module.forward
