"""The start-up probe: does a document in a packed row influence another one?

A log line that says "packing is on" proves nothing: patches have missed a class and logged success. The probe
runs packed rows through a tiny copy of the model and compares what every layer makes of them.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from posttrain.errors import UserError
from posttrain.models.gdn_kernels import boundaries

WAY_OUT = "packing=padded works: it puts one document in a row."
DOCUMENTS = (13, 1, 2, 65, 17, 64)  # lengths around the convolution's width and the chunk of 64
SLOW_DECAY = {"A_log": -3.0, "dt_bias": -2.0}  # A 0.05, dt 0.13: the state outlives every document here

# Relative to the largest value. Measured over 12 seeds on every architecture: rounding stays under 3e-6 in
# fp32 and 3.3e-2 in bf16 (gradients; 5e-3 forward); a leak of either kernel is at least 0.48.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.03}
TF32_TOLERANCE = 0.01  # fused kernels multiply fp32 with 10 bits of mantissa

Trace = list[tuple[str, Tensor]]  # (layer class, its output [T, D]) in order of execution, the logits last


class PackingLeak(UserError):
    """The probe saw a document influence another one, or could not run a packed row."""


def stateful_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that carry a state along the row: those that own a decay or a depthwise convolution."""

    def is_stateful(module: nn.Module) -> bool:
        decays = any(name in ("A_log", "dt_bias") for name, _ in module.named_parameters(recurse=False))
        convolutions = (child for child in module.children() if isinstance(child, nn.Conv1d))
        return decays or any(1 < convolution.groups == convolution.in_channels for convolution in convolutions)

    return [module for module in model.modules() if is_stateful(module)]


def mixers(model: nn.Module) -> list[nn.Module]:
    """Layers that move information along a row: the stateful ones and attention (which has a `layer_idx`)."""
    stateful = set(stateful_layers(model))
    return [module for module in model.modules() if module in stateful or hasattr(module, "layer_idx")]


def tiny_copy(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> PreTrainedModel | None:
    """A model of the same layer classes: thin, shallow, random, slow to forget. None if it cannot be had."""
    text = model.config.get_text_config(decoder=True)
    build = type(model) if text is model.config else AutoModelForCausalLM.from_config
    try:
        with torch.device(device):
            small = build(_shrunk(text)).to(dtype)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):  # a config of other rules
        return None
    for name, parameter in small.named_parameters():
        if (value := SLOW_DECAY.get(name.rpartition(".")[2])) is not None:
            nn.init.constant_(parameter, value)
    same = {type(layer) for layer in mixers(small)} == {type(layer) for layer in mixers(model)}
    return small if same else None


def _shrunk(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same architecture with the same head widths and head grouping, and little of everything else."""
    config = copy.deepcopy(config)
    heads = config.num_attention_heads
    grouped = (getattr(config, "num_key_value_heads", None) or heads) < heads
    layer_types = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    key_heads, value_heads = (getattr(config, f"linear_num_{kind}_heads", None) or 2 for kind in ("key", "value"))
    small = {
        "vocab_size": 64,
        "hidden_size": 64 if getattr(config, "head_dim", None) else 2 * config.hidden_size // heads,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1 if grouped else 2,
        "num_hidden_layers": len(layer_types) or 2,
        "layer_types": layer_types,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2 * value_heads // key_heads,
        # every expert takes every token: a tie in the router, rounded differently, would look like a leak
        **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), 4),
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
        "initializer_range": 0.1,  # at 0.02 a layer this thin would drown in the residual stream
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), None),
    }
    for name, value in small.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    return config


class Probe:
    """Runs rows of `DOCUMENTS` through a model and compares what every layer makes of them."""

    def __init__(self, model: PreTrainedModel):
        parameter = next(model.parameters())
        self.model, self.device, self.tolerance = model, parameter.device, TOLERANCE[parameter.dtype]
        if parameter.dtype is torch.float32 and self.device.type == "cuda":
            self.tolerance = TF32_TOLERANCE
        self.vocabulary = model.config.get_text_config(decoder=True).vocab_size
        self.ids_T, self.other_T = torch.randint(self.vocabulary, (2, sum(DOCUMENTS)), device=self.device)
        number_T = torch.arange(len(DOCUMENTS)).repeat_interleave(torch.tensor(DOCUMENTS))
        self.odd_T = (number_T % 2 == 1).to(self.device)

    @torch.no_grad()
    def forward(self) -> float:
        """Checks (a), (b) and (d) of `verify`; returns the largest difference."""
        whole = (len(self.ids_T),)
        before = self._run(self.ids_T, whole)
        alone = [self._run(ids_T, (len(ids_T),)) for ids_T in self.ids_T.split(DOCUMENTS)]
        separate = [(same[0][0], torch.cat([output for _, output in same])) for same in zip(*alone, strict=True)]
        packed = self._run(self.ids_T, DOCUMENTS)
        largest = [self._compare(separate, packed, "a packed document differs from the same one alone")]
        for other_T in (self.odd_T, ~self.odd_T):
            changed = self._run(torch.where(other_T, self.other_T, self.ids_T), DOCUMENTS)
            kept, now = ([(name, output[~other_T]) for name, output in trace] for trace in (packed, changed))
            largest.append(self._compare(kept, now, "a document sees what its neighbours hold"))
        after = self._run(self.ids_T, whole)
        largest.append(self._compare(before, after, "a packed row changes the row after it"))
        return max(largest)

    def gradients(self) -> float:
        """Check (c) of `verify`; returns the largest difference."""
        whole = type(self.model).__name__
        owner = {p: type(layer).__name__ for layer in reversed(mixers(self.model)) for p in layer.parameters()}
        owner |= {p: whole for p in self.model.parameters() if p not in owner}  # mixers first, the last one first
        target_TV = torch.randn(len(self.ids_T), self.vocabulary, device=self.device)
        embedded: list[Tensor] = []  # [1, T, D] of each run

        def gradients(loss: Tensor, keep: bool = False) -> list[Tensor]:
            wanted = [embedded[-1], *owner]
            return list(torch.autograd.grad(loss, wanted, retain_graph=keep, materialize_grads=True))

        hook = self.model.get_input_embeddings().register_forward_hook(lambda *call: embedded.append(call[2]))
        with hook:
            loss_T = (self._run(self.ids_T, DOCUMENTS)[-1][1].float() * target_TV).sum(-1)
            halves = [gradients(loss_T[mask_T].sum(), keep=True) for mask_T in (self.odd_T, ~self.odd_T)]
            alone = [
                gradients((self._run(ids_T, (len(ids_T),))[-1][1].float() * own_target_TV).sum())
                for ids_T, own_target_TV in zip(self.ids_T.split(DOCUMENTS), target_TV.split(DOCUMENTS), strict=True)
            ]
        separate, packed = (
            [(name, sum(parts)) for name, *parts in zip(owner.values(), *(g[1:] for g in runs), strict=True)]
            for runs in (alone, halves)
        )
        # some are zero but for rounding (of a bias of the keys, say): they are measured by the largest one
        floor = 0.1 * max(float(gradient.abs().max()) for _, gradient in separate)
        largest = [self._compare(separate, packed, "the gradient of a packed row differs", floor)]
        for mask_T, (reached_1TD, *_) in zip((self.odd_T, ~self.odd_T), halves, strict=True):
            what, own_1TD = (
                "a document's loss has a gradient in its neighbours",
                reached_1TD * mask_T[:, None],
            )
            largest.append(self._compare([(whole, own_1TD)], [(whole, reached_1TD)], what))
        return max(largest)

    def _run(self, ids_T: Tensor, lengths: tuple[int, ...]) -> Trace:
        """One row through the model: what each layer that mixes tokens made of it, and the logits."""
        trace: Trace = []
        running = [type(self.model).__name__]

        def before(layer: nn.Module, *_) -> None:
            running.append(type(layer).__name__)

        def after(layer: nn.Module, _, output) -> None:
            trace.append((running.pop(), (output[0] if isinstance(output, tuple) else output)[0]))

        hooks = [layer.register_forward_pre_hook(before) for layer in mixers(self.model)]
        hooks += [layer.register_forward_hook(after) for layer in mixers(self.model)]
        try:
            logits = self.model(input_ids=ids_T[None], **boundaries(lengths, self.device)).logits
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            raise PackingLeak(f"packing=thd: {running[-1]} cannot run a packed row: {reason}. {WAY_OUT}") from error
        finally:
            for hook in hooks:
                hook.remove()
        return [*trace, (type(self.model).__name__, logits[0])]

    def _compare(self, expected: Trace, actual: Trace, what: str, floor: float = 1e-30) -> float:
        """The largest relative difference. Errors: PackingLeak at the first layer past the tolerance."""
        largest = 0.0
        for (name, wanted), (_, found) in zip(expected, actual, strict=True):
            scale = max(float(wanted.abs().max()), floor)
            relative = float((wanted.float() - found.float()).abs().max()) / scale
            if not relative <= self.tolerance:  # also for NaN
                raise PackingLeak(
                    f"packing=thd is unsafe here: {name} leaks between documents ({what}, by {relative:.2g} "
                    f"of the largest value; rounding stays under {self.tolerance:.0e}). {WAY_OUT}"
                )
            largest = max(largest, relative)
        return largest
