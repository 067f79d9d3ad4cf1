"""The start-up probe: does a document in a packed row influence another one?

A log line that says "packing is on" proves nothing: patches have missed a class and logged success. The probe
runs packed rows through a tiny copy of the model and compares what every layer makes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.errors import UserError
from posttrain.models.packed.boundaries import boundaries
from posttrain.models.packed.dispatch import reached
from posttrain.models.packed.layers import carried, mixers

WAY_OUT = "packing=padded works: it puts one document in a row."
DOCUMENTS = (13, 1, 2, 65, 17, 64)  # lengths around the convolution's width and the chunk of 64

# (forward, gradient), relative to the largest value. Measured on every architecture that packs: rounding stays under
# 1e-5 in fp32; in bf16 under 0.009 forward and 0.05 on gradients (of attention sinks, of a bias of the keys).
# Boundaries dropped for one operation are at least 0.7 forward, one boundary of six at least 0.19.
TOLERANCE = {
    torch.float64: (1e-4, 1e-4),
    torch.float32: (1e-4, 1e-4),
    torch.bfloat16: (0.03, 0.15),
    torch.float16: (0.01, 0.05),
}
TF32_TOLERANCE = (0.01, 0.05)  # fused kernels multiply fp32 with 10 bits of mantissa

Trace = list[tuple[str, Tensor]]  # (layer class, its output [T, D]) in order of execution, the logits last


class PackingLeak(UserError):
    """The probe saw a document influence another one, or could not run a packed row."""


class Probe:
    """Runs rows of `DOCUMENTS` through a model and compares what every layer makes of them.

    Without `packed` the documents are rows of one batch, padded on the right, and the logits are compared.
    """

    def __init__(self, model: PreTrainedModel, packed: bool = True):
        self.packed = packed
        self.mode = "thd" if packed else "padded"
        self.way_out = WAY_OUT if packed else "packing.tokens_per_row=1 works: it puts one document in a micro-batch."
        parameter = next(model.parameters())
        self.model, self.device = model, parameter.device
        self.dtype = parameter.dtype
        self.tolerance, self.gradient_tolerance = TOLERANCE[parameter.dtype]
        if parameter.dtype is torch.float32 and self.device.type == "cuda":
            self.tolerance, self.gradient_tolerance = TF32_TOLERANCE
        self.reached: set[tuple[nn.Module, str]] = set()  # what boundaries were told to keep apart, by layer
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
        longest = max(self.ids_T.split(DOCUMENTS), key=len)
        plain = self._call(lambda: self.model(input_ids=longest[None], use_cache=False).logits[0])
        _, ours = self._run(longest, (len(longest),))[-1]
        apart = float((plain.float() - ours.float()).abs().max() / plain.float().abs().max())
        if not apart <= self.tolerance:
            raise PackingLeak(
                f"packing={self.mode} is unsafe here: {type(self.model).__name__} counts positions otherwise than from "
                f"0 (a document alone differs by {apart:.2g} of the largest value from the same call without "
                "position_ids). Take another model"
            )
        largest.append(apart)
        for other_T in (self.odd_T, ~self.odd_T):
            changed = self._run(torch.where(other_T, self.other_T, self.ids_T), DOCUMENTS)
            kept, now = ([(name, output[~other_T]) for name, output in trace] for trace in (packed, changed))
            largest.append(self._compare(kept, now, "a document sees what its neighbours hold"))
        after = self._run(self.ids_T, whole)
        largest.append(self._compare(before, after, "a packed row changes the row after it"))
        if self.packed:
            self._all_reached()
        return max(largest)

    def gradients(self) -> float:
        """Check (c) of `verify`; returns the largest difference."""
        whole = type(self.model).__name__
        owner = {p: type(layer).__name__ for layer in reversed(mixers(self.model)) for p in layer.parameters()}
        # A parameter belongs to the innermost mixer that holds it, else to the whole model.
        owner |= {p: whole for p in self.model.parameters() if p not in owner}
        owner = {p: name for p, name in owner.items() if p.requires_grad}
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
        what = "the gradient of a packed row differs"
        largest = [self._compare(separate, packed, what, self.gradient_tolerance, floor)]
        if not self.packed:
            # Rows of a batch have no common row of embeddings.
            return max(largest)
        for mask_T, (reached_1TD, *_) in zip((self.odd_T, ~self.odd_T), halves, strict=True):
            what, own_1TD = (
                "a document's loss has a gradient in its neighbours",
                reached_1TD * mask_T[:, None],
            )
            largest.append(self._compare([(whole, own_1TD)], [(whole, reached_1TD)], what, self.gradient_tolerance))
        return max(largest)

    def _all_reached(self) -> None:
        """PackingLeak for a layer with a state that boundaries never came to, though no difference was seen."""
        for layer, carries in carried(self.model).items():
            for what in sorted(carries):
                if (layer, what) not in self.reached:
                    where = f"the {what} of {type(layer).__name__}"
                    raise PackingLeak(f"packing=thd is unsafe here: no boundaries reach {where}. {self.way_out}")

    def _run(self, ids_T: Tensor, lengths: tuple[int, ...]) -> Trace:
        """One row through the model: what each layer that mixes tokens made of it, and the logits."""
        if not self.packed:
            return [(type(self.model).__name__, self._side_by_side(ids_T, lengths))]
        trace: Trace = []
        running: list[nn.Module] = [self.model]

        def before(layer: nn.Module, *_: Any) -> None:
            running.append(layer)

        def after(layer: nn.Module, _: Any, output: Any) -> None:
            made, name = output[0] if isinstance(output, tuple) else output, type(running.pop()).__name__
            if isinstance(made, Tensor) and made.is_floating_point() and made.shape[:2] == (1, len(ids_T)):
                trace.append((name, made[0]))

        hooks = [layer.register_forward_pre_hook(before) for layer in mixers(self.model)]
        hooks += [layer.register_forward_hook(after) for layer in mixers(self.model)]
        notice = reached.set(lambda what: self.reached.add((running[-1], what)))
        inputs = boundaries(lengths, self.device)
        try:
            logits = self._call(lambda: self.model(input_ids=ids_T[None], **inputs).logits, running)
        finally:
            reached.reset(notice)
            for hook in hooks:
                hook.remove()
        if logits.shape[1] != len(ids_T):
            raise self._cannot(running[-1], f"{logits.shape[1]} logits for {len(ids_T)} tokens")
        return [*trace, (type(self.model).__name__, logits[0])]

    def _side_by_side(self, ids_T: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """Documents as rows of a batch, padded on the right as packing=padded does; logits of their tokens [T, V]."""
        width = max(lengths)
        rows = [nn.functional.pad(ids, (0, width - len(ids))) for ids in ids_T.split(lengths)]
        length_B1 = torch.tensor(lengths, device=self.device)[:, None]
        place_T = torch.arange(width, device=self.device)
        inputs = {
            "input_ids": torch.stack(rows),
            "attention_mask": (place_T < length_B1).long(),
            "position_ids": place_T.expand(len(rows), -1),
            "use_cache": False,
        }
        logits_BTV = self._call(lambda: self.model(**inputs).logits)
        return torch.cat([logits_TV[:n] for logits_TV, n in zip(logits_BTV, lengths, strict=True)])

    def _call(self, call: Callable[[], Tensor], running: Sequence[nn.Module] = ()) -> Tensor:
        """What `call` returns. Errors: PackingLeak in the words of whatever the model raises."""
        try:
            return call()
        # An architecture that cannot be called so may raise anything.
        except Exception as error:
            reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
            raise self._cannot(running[-1] if running else self.model, reason) from error

    def _cannot(self, layer: nn.Module, reason: str) -> PackingLeak:
        what = "a packed row" if self.packed else "a padded batch"
        return PackingLeak(f"packing={self.mode}: {type(layer).__name__} cannot run {what}: {reason}. {self.way_out}")

    def _compare(
        self, expected: Trace, actual: Trace, what: str, tolerance: float | None = None, floor: float = 1e-30
    ) -> float:
        """The largest relative difference. Errors: PackingLeak at the first layer past the tolerance."""
        largest, tolerance = 0.0, self.tolerance if tolerance is None else tolerance
        for (name, wanted), (_, found) in zip(expected, actual, strict=True):
            scale = max(float(wanted.abs().max()), floor)
            relative = float((wanted.float() - found.float()).abs().max()) / scale
            # Written so that NaN fails as well.
            if not relative <= tolerance:
                raise PackingLeak(
                    f"packing={self.mode} is unsafe here: {name} leaks between documents ({what}, by {relative:.2g} "
                    f"of the largest value; rounding stays under {tolerance:.0e}). {self.way_out}"
                )
            largest = max(largest, relative)
        return largest
