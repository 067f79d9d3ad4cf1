"""The walk over a model's modules: what each multiplies, which part of the model that is, who gets a gradient."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from posttrain.flops.cores import Core, check_layers, find_core, refused
from posttrain.flops.cost import FlopsCounter, Key, Unit, total

# Not run on text alone: towers of other inputs, and attention to an encoder that a causal language model lacks.
TOWERS = re.compile(r"(^|[._])(vision|visual|image|audio|speech|embed_tokens_extend)\w*(\.|$)")
CROSS_ATTENTION = re.compile(r"(^|\.)encoder_attn(\.|$)")
IN_ATTENTION = re.compile(r"\.(attention|self_attention|self_attn|attn|self_att)\.")


def size(model: nn.Module) -> FlopsCounter:
    """Count a transformers causal language model, before or after FSDP2 or DDP wraps it. Runs no forward.

    Raises ValueError naming the module class it cannot count.
    """
    while isinstance(model, DistributedDataParallel):
        model = model.module
    walk = _Walk(model)
    forward: defaultdict[Key, float] = defaultdict(int)
    training: defaultdict[Key, float] = defaultdict(int)
    # The decoder layers that a gradient passes.
    passed: set[str] = set()
    # Order of registration stands for order of execution, but a layer's norms, registered last, run first.
    # Where else they differ (a router after its experts), only the first layer with anything trainable is
    # miscounted, and only if that layer is frozen in part.
    trained = [name for name, weight in walk.root.named_parameters() if weight.requires_grad]
    trained_norms = {_layer(name) for name in trained if name.endswith("norm.weight")}
    # Does the input of the module at hand have a gradient?
    gradient_flows = False
    for name, module in walk.executed():
        layer = _layer(name)
        flows = gradient_flows or layer in trained_norms
        for part, unit, flops, weight in walk.matmuls(name, module):
            # Both operands are activations.
            if weight is None:
                gradients = 2 * (flows or any(parameter.requires_grad for parameter in module.parameters()))
            else:
                gradients = flows + weight.requires_grad
            key = part, unit, layer if layer in walk.layers else None
            forward[key] += flops
            training[key] += flops * (1 + gradients)
            if gradients:
                passed.add(layer)
        gradient_flows |= any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    return FlopsCounter(
        forward_cost=total(forward, forward),
        training_cost=total(training, training),
        recomputed_cost=total(forward, (key for key in forward if key[2] in passed & walk.layers.keys())),
        parts={part: total(forward, (key for key in forward if key[0] == part)) for part, _, _ in forward},
    )


class _Walk:
    """A model's modules by name, with the cores and decoder layers among them. Raises ValueError, see `size`.

    The model is a PreTrainedModel, or what torch.compile made of one, which is no subclass of it.
    """

    def __init__(self, model: Any) -> None:
        self.config: PreTrainedConfig = model.config.get_text_config(decoder=True)
        self.head = model.get_output_embeddings()
        self.root: nn.Module = model if self.config is model.config else model.get_decoder()
        if not isinstance(self.head, nn.Linear):
            raise ValueError(f"{_class(self.root)}: its LM head is a {_class(self.head)}, not a linear layer")
        if self.config.is_encoder_decoder or getattr(self.config, "add_cross_attention", False):
            raise ValueError(f"{_class(self.root)}: cross-attention is not counted")
        for name, module, reason in refused(self.root):
            raise ValueError(f"{name}: {_class(module)} {reason}")
        self.modules = dict(self.root.named_modules(remove_duplicate=False))
        if self.head not in self.modules.values():
            self.modules["lm_head"] = self.head
        self.layers = self._find_layers()
        self._refuse_reuse()
        self._refuse_beside_the_layers()
        # Modules beside the base model run on the positions with logits alone.
        base = model.base_model
        self.per_logit: Container[int] = ()
        if base is not model:
            self.per_logit = set(map(id, self.modules.values())) - set(map(id, base.modules()))
        self.cores: dict[str, Core] = {}
        for name, module in self.executed():
            if core := find_core(name, module, self.config):
                self.cores[name] = core
        check_layers(self.layers, self.cores)

    def executed(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules that text runs through, one that several layers share as often as they do."""
        for name, module in self.modules.items():
            # A layer may have experts of its own for pictures; its name in the model says nothing of it.
            within = name.removeprefix(_layer(name)) if _layer(name) in self.layers else name
            if not CROSS_ATTENTION.search(name) and not TOWERS.search(within):
                yield name, module

    def _find_layers(self) -> dict[str, nn.Module]:
        # with an encoder's config num_hidden_layers is the encoder's
        count = getattr(self.config, "decoder_layers", None) or getattr(self.config, "num_hidden_layers", None)
        lists = [
            name
            for name, module in self.modules.items()
            if isinstance(module, nn.ModuleList) and len(module) == count and name == _layer(name)
            if not TOWERS.search(name) and any(True for _ in module.parameters())
        ]
        if len(lists) != 1:
            raise ValueError(f"{_class(self.root)}: {len(lists)} lists of {count} decoder layers, not one")
        return {f"{lists[0]}.{key}": layer for key, layer in enumerate(self.modules[lists[0]])}

    def _refuse_reuse(self) -> None:
        """A module of several layers runs in each of them; elsewhere it has two names, and may run once or twice."""
        first: dict[int, str] = {}
        for name, module in self.modules.items():
            before = first.setdefault(id(module), name)
            layers = _layer(before), _layer(name)
            shared = layers[0] != layers[1] and all(layer in self.layers for layer in layers)
            if before != name and not shared and any(True for _ in module.parameters()):
                raise ValueError(f"{name}: this {_class(module)} runs more than once in a pass, it is {before} too")

    def _refuse_beside_the_layers(self) -> None:
        """More layers of the decoder's kind (to predict further tokens, say), or a weight and its trained copy."""
        kinds = {type(layer) for layer in self.layers.values()}
        for name, module in self.modules.items():
            beside = _layer(name) not in self.layers and type(module) in kinds
            if beside or name.endswith(".modules_to_save"):
                raise ValueError(f"{name}: whether this {_class(module)} runs is not known")

    def matmuls(self, name: str, module: nn.Module) -> Iterator[tuple[str, Unit, float, Tensor | None]]:
        """Yield (part, unit, forward FLOPs, weight) of the module's own multiplications.

        `weight` is the parameter, None where two activations meet.
        """
        part, unit = self._part(name), "token"
        if module is self.head or id(module) in self.per_logit:
            part, unit = "LM head", "logit"
        # A norm that has a weight for each head multiplies elements all the same.
        norm = "norm" in _class(module).lower()
        own = [] if norm else module.named_parameters(recurse=False)
        matrices = {key: weight for key, weight in own if weight.ndim >= 2}
        if isinstance(module, nn.Linear):
            yield part, unit, 2 * module.in_features * module.out_features * self._share(name), module.weight
        elif isinstance(module, Conv1D):
            inputs, outputs = module.weight.shape
            yield part, unit, 2 * inputs * outputs * self._share(name), module.weight
        elif isinstance(module, nn.Conv1d) and _parent(name) in self.cores and module.groups == module.in_channels:
            yield "convolution", unit, 2 * module.weight.numel(), module.weight
        elif isinstance(module, nn.Embedding):
            pass  # a look-up; as a tied LM head it is counted at the head, which is a Linear
        elif list(matrices) == ["weight"] and hasattr(module, "top_k") and matrices["weight"].ndim == 2:
            yield "router", unit, 2 * matrices["weight"].numel(), matrices["weight"]
        elif matrices:
            experts = getattr(module, "num_experts", getattr(module, "moe_num_experts", 0))
            for key, weight in matrices.items():
                # A bias is added, and A_log is the decay of a core: neither multiplies matrices.
                if key.endswith("bias") or key == "A_log":
                    continue
                stacked = weight.ndim == 3 and weight.shape[0] == experts
                if not stacked and not (weight.ndim == 2 and hasattr(module, "moe_num_experts")):
                    owner = f"{_class(module)} in {_class(self.modules[_parent(name)])}"
                    raise ValueError(f"{name}.{key}: the use of this weight of {owner} is not known")
                yield "experts", unit, 2 * weight.numel() // experts * self._top_k(name), weight
        if (core := self.cores.get(name)) and core.flops:
            yield f"{core.kind} core", core.unit, core.flops, None

    def _part(self, name: str) -> str:
        """The part of the model whose weights these are."""
        around = [parent for parent in _parents(name) if parent]
        for parent in around:
            if core := self.cores.get(parent):
                return f"{core.kind} projections"
        if IN_ATTENTION.search(name):
            return "attention projections"
        if re.search(r"\.shared_(expert|mlp)", name):
            return "shared experts"
        for parent in around:
            within = name[len(parent) + 1 :]
            if "experts" in dict(self.modules[parent].named_children()) and not within.startswith("experts"):
                if re.match(r"(gate|router|classifier)(\.|$)", within):
                    return "router"
        if ".experts." in name:
            return "experts"
        return "dense MLP" if _layer(name) in self.layers else "embedding projections"

    def _top_k(self, name: str) -> int:
        """Experts a token passes, from the router nearest to these experts."""
        for block in _parents(name):
            for module in self.modules[block].modules() if _layer(block) in self.layers else ():
                if isinstance(getattr(module, "top_k", None), int):
                    return module.top_k
        owner = _class(self.modules[_parent(name)])
        raise ValueError(f"{name}: how many experts of {owner} a token passes is not known")

    def _share(self, name: str) -> float:
        """Part of the tokens that pass a layer: top_k / E for one of the experts of a list, else 1."""
        expert = re.match(r"(.*\.experts)\.\d+\.", name)
        return self._top_k(expert[1]) / len(self.modules[expert[1]]) if expert else 1


def _layer(name: str) -> str:
    """The decoder layer ("model.layers.3") that a parameter or module is in, or its own name if in none."""
    layer = re.match(r".*?\.\d+(?=\.|$)", name)
    return layer[0] if layer else name


def _parents(name: str) -> list[str]:
    """The names of the modules around this one, nearest first; "" is the model."""
    words = name.split(".")
    return [".".join(words[:n]) for n in range(len(words) - 1, -1, -1)]


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _class(module: object) -> str:
    return type(module).__name__
