"""Model FLOPs, counted once from the modules of the instantiated model.

Model FLOPs are the matrix multiplications the mathematics needs, 2mnk each: what MFU divides by time and peak
(Chowdhery et al., PaLM, appendix B). A causal query is billed for the keys it may see, packed documents each
on their own, linear attention for its recurrence, the LM head for the positions whose logits are computed.
Recomputed activations, embedding look-ups, norms and softmax are not billed; nor are vision towers, which
text tokens do not pass. Shapes are read from modules, not from config fields, whose names and meanings differ
between families. What is not understood is refused by name: an MFU is right or absent.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers.pytorch_utils import Conv1D

OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "dense", "c_proj")
GATED_DELTA_RULE = ("A_log", "dt_bias", "num_v_heads", "head_k_dim", "head_v_dim")


@dataclass(frozen=True)
class PassCost:
    """FLOPs of one pass through the model, as a function of the documents alone."""

    per_token: float
    per_logit: float  # the LM head, for one position
    per_pair: dict[int | None, float]  # by sliding window: one query-key pair in all layers of that window

    def __call__(self, lengths: Sequence[int], logits: int) -> float:
        attention = sum(flops * causal_pairs(lengths, window) for window, flops in self.per_pair.items())
        return float(self.per_token * sum(lengths) + self.per_logit * logits + attention)


@dataclass(frozen=True)
class FlopsCounter:
    """FLOPs for documents of these `lengths` in tokens, the LM head computing `logits` positions in all."""

    forward_cost: PassCost
    training_cost: PassCost

    def forward(self, lengths: Sequence[int], logits: int) -> float:
        """A pass without gradients: old or reference log-probabilities, evaluation, prefill and decoding."""
        return self.forward_cost(lengths, logits)

    def training(self, lengths: Sequence[int], logits: int) -> float:
        """Forward and backward: 3x for trainable weights, 2x for frozen ones that a gradient passes."""
        return self.training_cost(lengths, logits)

    def rollout(self, groups: Sequence[tuple[int, Sequence[int]]]) -> float:
        """Sampling: (prompt length, lengths of its completions) of each group.

        A group's prompt is prefilled once, and gives the logits of every first token; a completion's last token is
        never fed back.
        """
        flops = 0.0
        for prompt, completions in groups:
            prefill = self.forward_cost([prompt], 0)
            flops += self.forward_cost([prompt], 1)
            flops += sum(self.forward_cost([prompt + n - 1], n - 1) - prefill for n in completions)
        return flops


def causal_pairs(lengths: Sequence[int], window: int | None = None) -> int:
    """Query-key pairs of causal attention: position p of a document, from 1, sees min(p, window) keys."""
    pairs = 0
    for length in lengths:
        inside = length if window is None else min(length, window)
        pairs += inside * (inside + 1) // 2 + (length - inside) * inside
    return pairs


def size(model: nn.Module) -> FlopsCounter:
    """Count a transformers causal language model, before or after FSDP2 or DDP wraps it. Runs no forward.

    Raises ValueError naming the module class it cannot count.
    """
    while isinstance(model, DistributedDataParallel):
        model = model.module
    config, head = model.config.get_text_config(decoder=True), model.get_output_embeddings()
    root = model if config is model.config else model.get_decoder()
    _refuse_unusual(root, head, config)
    modules = dict(root.named_modules())
    if head not in modules.values():
        modules["lm_head"] = head

    # Order of registration stands for order of execution, but a layer's norms, registered last, run first.
    # Where else they differ (a router after its experts), only the first layer with anything trainable is
    # miscounted, and only if that layer is frozen in part.
    trained = [name for name, weight in root.named_parameters() if weight.requires_grad]
    trained_norms = {_layer(name) for name in trained if name.endswith("norm.weight")}
    forward, training = Counter(), Counter()
    gradient_flows = False  # whether the input of the module at hand has a gradient
    for name, module in modules.items():
        flows = gradient_flows or _layer(name) in trained_norms
        for unit, flops, weight in _matmuls(name, module, modules, config):
            if weight is None:  # both operands are activations
                gradients = 2 * (flows or any(parameter.requires_grad for parameter in module.parameters()))
            else:
                gradients = flows + weight.requires_grad
            unit = "logit" if module is head else unit
            forward[unit] += flops
            training[unit] += flops * (1 + gradients)
        gradient_flows |= any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    _refuse_unknown_layers(root, modules, config)
    return FlopsCounter(_pass_cost(forward), _pass_cost(training))


def _pass_cost(flops: Counter) -> PassCost:
    pairs = {unit[1]: count for unit, count in flops.items() if isinstance(unit, tuple)}
    return PassCost(flops["token"], flops["logit"], pairs)


def _matmuls(name: str, module: nn.Module, modules: dict[str, nn.Module], config) -> Iterator[tuple]:
    """Yield (unit, forward FLOPs, weight) of the module's own multiplications.

    A unit is "token" or ("pair", window). `weight` is the parameter, None where two activations meet.
    """
    matrices = [(key, weight) for key, weight in module.named_parameters(recurse=False) if weight.ndim >= 2]
    if isinstance(module, nn.Linear):
        yield "token", 2 * module.in_features * module.out_features * _share(name, modules), module.weight
    elif isinstance(module, Conv1D):
        inputs, outputs = module.weight.shape
        yield "token", 2 * inputs * outputs * _share(name, modules), module.weight
    elif isinstance(module, nn.Conv1d) and _is_gated_delta_net(modules[_parent(name)]):
        channels, per_group, taps = module.weight.shape
        yield "token", 2 * channels * per_group * taps, module.weight
    elif isinstance(module, nn.Embedding):
        pass  # a look-up; as a tied LM head it is counted at the head, which is a Linear
    elif _is_router(module, matrices):
        experts, width = module.weight.shape
        yield "token", 2 * experts * width, module.weight
    elif matrices:
        for key, weight in matrices:
            if key.endswith("bias"):
                continue
            if weight.ndim != 3 or weight.shape[0] != getattr(module, "num_experts", None):
                owner = f"{_name(module)} in {_name(modules[_parent(name)])}"
                raise ValueError(f"{name}.{key}: the use of this weight of {owner} is not known")
            yield "token", 2 * weight.shape[1] * weight.shape[2] * _top_k(_parent(name), modules), weight
    if _is_attention(module):
        yield ("pair", _window(module, config)), _pair_flops(name, module), None
    elif _is_gated_delta_net(module):  # per head and token: read the state, write it, query it: dk x dv each
        yield "token", 6 * module.num_v_heads * module.head_k_dim * module.head_v_dim, None


def _pair_flops(name: str, attention: nn.Module) -> float:
    """q.k and p.v of one query-key pair over all heads, 2 H (dk + dv); the output projection tells H dv."""
    matrix = next((child for key, child in attention.named_children() if key in OUTPUT_PROJECTIONS), None)
    width = matrix.weight.shape[0] if isinstance(matrix, Conv1D) else getattr(matrix, "in_features", None)
    if width is None:
        raise ValueError(f"{name}: {_name(attention)} has no output projection of a known name and kind")
    if any("sink" not in key for key, _ in attention.named_parameters(recurse=False)):
        raise ValueError(f"{name}: {_name(attention)} has parameters of its own: not the usual attention")
    key_width = getattr(attention, "qk_head_dim", getattr(attention, "head_dim", 1))
    return 2 * width * (1 + key_width / getattr(attention, "v_head_dim", key_width))


def _window(attention: nn.Module, config) -> int | None:
    """The sliding window of a layer; None where a query sees everything before it."""
    kinds = getattr(config, "layer_types", None)
    kind = kinds[attention.layer_idx] if kinds else None
    if kind not in (None, "full_attention", "sliding_attention"):
        raise ValueError(f"{_name(attention)}: attention of the kind {kind!r} is not counted")
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window
    return None if kind == "full_attention" else getattr(config, "sliding_window", None)


def _refuse_unusual(root: nn.Module, head: nn.Module | None, config) -> None:
    """Raise ValueError for what a walk over modules would miscount in silence."""
    if not isinstance(head, nn.Linear):
        raise ValueError(f"{_name(root)}: its LM head is a {_name(head)}, not a linear layer")
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise ValueError(f"{_name(root)}: cross-attention is not counted")
    once = {id(module) for module in root.modules()}
    for name, module in root.named_modules(remove_duplicate=False):
        if id(module) not in once and any(True for _ in module.parameters()):
            raise ValueError(f"{name}: this {_name(module)} runs more than once in a pass")
        once.discard(id(module))
        indexed = [key for key, _ in module.named_children() if "indexer" in key]
        if indexed or getattr(module, "is_kv_shared_layer", False):
            raise ValueError(f"{name}: {_name(module)} chooses or shares its keys, which is not counted")


def _refuse_unknown_layers(root: nn.Module, modules: dict[str, nn.Module], config) -> None:
    """Raise ValueError unless each decoder layer has exactly one known way to mix its tokens."""
    count = getattr(config, "num_hidden_layers", None)
    layers = [name for name in modules if re.search(r"\.\d+$", name) and name == _layer(name)]
    layers = [name for name in layers if len(modules[_parent(name)]) == count]
    if not layers:
        raise ValueError(f"{_name(root)}: no list of {count} decoder layers found")
    for name in layers:
        layer = modules[name]
        cores = sum(_is_attention(module) or _is_gated_delta_net(module) for module in layer.modules())
        if cores != 1:
            raise ValueError(f"{name}: {_name(layer)} has {cores} attention or delta-rule cores known, not 1")


def _is_attention(module: nn.Module) -> bool:
    return getattr(module, "is_causal", None) is True


def _is_gated_delta_net(module: nn.Module) -> bool:
    return all(hasattr(module, attribute) for attribute in GATED_DELTA_RULE)


def _is_router(module: nn.Module, matrices: list) -> bool:
    return [key for key, _ in matrices] == ["weight"] and hasattr(module, "top_k") and module.weight.ndim == 2


def _top_k(block: str, modules: dict[str, nn.Module]) -> int:
    """Experts a token passes, from the router in the mixture-of-experts block of this name."""
    for module in modules[block].modules():
        if isinstance(getattr(module, "top_k", None), int):
            return module.top_k
    raise ValueError(f"{block}: how many experts of {_name(modules[block])} a token passes is not known")


def _share(name: str, modules: dict[str, nn.Module]) -> float:
    """Part of the tokens that pass a layer: top_k / E for one of the experts of a list, else 1."""
    expert = re.match(r"(.*)\.experts\.\d+\.", name)
    return _top_k(expert[1], modules) / len(modules[f"{expert[1]}.experts"]) if expert else 1


def _layer(name: str) -> str:
    """The decoder layer ("model.layers.3") that a parameter or module is in, or its own name if in none."""
    layer = re.match(r".*?\.\d+(?=\.|$)", name)
    return layer[0] if layer else name


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _name(module: object) -> str:
    return type(module).__name__
