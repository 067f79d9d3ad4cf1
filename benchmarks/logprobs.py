"""What logprobs by chunks of the vocabulary cost and save, against full logits.

    python benchmarks/logprobs.py

First the head alone, as large as that of a Qwen3.5: peak memory above the state before the call, of forward and
backward. `tensors` counts the storages alive after each operation, on fake tensors, so that what does not fit can be
counted too; `process` is the peak of a process of its own, which holds what operations need inside as well. Then whole
updates of small models, forward, backward and AdamW: full logits and chunks in turn, medians.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import statistics
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedModel

from posttrain.config import Architecture, ModelConf, OptimConf
from posttrain.logprobs import token_logprobs
from posttrain.models import gdn_packing
from posttrain.models.head import Head, find_head
from posttrain.models.loading import load
from posttrain.models.tiny import tiny_config
from posttrain.training.optim import make_optimizer

VOCABULARY, TOKENS, HIDDEN = 248_320, 8_192, 1_024
FITTING = 2_048  # tokens whose full logits, 10 GB, fit into a laptop
WAYS = ("full logits", "chunks")


class HeadAlone(nn.Module):
    """A model that is its head, in bf16: hidden states [1, T, D] are a parameter."""

    def __init__(self, tokens: int):
        super().__init__()
        self.hidden_BTD = nn.Parameter(torch.randn(1, tokens, HIDDEN, dtype=torch.bfloat16))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=torch.bfloat16)

    def forward(self, **_) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.hidden_BTD))


class Alive(TorchDispatchMode):
    """Bytes of the storages that operations made inside: alive now, and at most."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {self._key(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        made = function(*args, **kwargs or {})
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and (key := self._key(tensor)) not in given | self.seen:
                size = tensor.untyped_storage().nbytes()
                self.seen.add(key)
                self.now += size
                weakref.finalize(tensor.untyped_storage(), self._freed, key, size)
        self.peak = max(self.peak, self.now)
        return made

    def _freed(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata


def forward_backward(tokens: int, way: str, measured: contextlib.AbstractContextManager) -> None:
    """Logprobs of `tokens` random targets and their gradients; what happens inside `measured` is the call itself."""
    model = HeadAlone(tokens)
    head = Head(linear=model.head if way == "chunks" else None, description=way)
    targets_BK, kept_K = torch.randint(VOCABULARY, (1, tokens)), torch.arange(tokens)
    row = SimpleNamespace(model_inputs=dict, kept_K=kept_K, targets_BK=targets_BK)
    with measured:
        logprobs_BK, _ = token_logprobs(model, row, 0.9, head)
        logprobs_BK.sum().backward()


def tensors(tokens: int, way: str) -> float:
    """GB of storages at the peak."""
    with FakeTensorMode():
        forward_backward(tokens, way, alive := Alive())
    return alive.peak / 1e9


@contextlib.contextmanager
def process_peak() -> Iterator[None]:
    """Prints the GB by which the peak of this process grows inside, and the seconds."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    yield
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print((after - before) * 1024 / 1e9, seconds)


def process(tokens: int, way: str) -> tuple[float, float]:
    """(GB, seconds) in a process of its own. Errors: CalledProcessError, it may not fit."""
    command = [sys.executable, __file__, str(tokens), way]
    gigabytes, seconds = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(gigabytes), float(seconds)


def larger_model() -> PreTrainedModel:
    """17 M parameters, of which the tied embedding and head are 12.6 M."""
    config = tiny_config("qwen3_5_dense")
    config.vocab_size, config.hidden_size, config.intermediate_size = 32_768, 384, 1_024
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    gdn_packing.patch(model)
    return model


def updates(model: PreTrainedModel, documents: int, count: int) -> dict[str, float]:
    """The median seconds of an update on one row of `documents` documents of 32 tokens, half of them completion."""
    head, optimizer = find_head(model), make_optimizer(model, OptimConf())
    inputs = gdn_packing.boundaries((32,) * documents, torch.device("cpu"))
    inputs["input_ids"] = torch.randint(model.config.vocab_size, (1, 32 * documents))
    kept_K = torch.arange(32 * documents).view(documents, 32)[:, 15:-1].flatten()
    inputs["logits_to_keep"], targets_BK = kept_K, inputs["input_ids"][:, kept_K + 1]
    row = SimpleNamespace(model_inputs=lambda: inputs, kept_K=kept_K, targets_BK=targets_BK)
    heads = dict(zip(WAYS, (dataclasses.replace(head, linear=None), head), strict=True))
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(count + 1):  # the first one warms up
        for way, own in heads.items():
            began = time.perf_counter()
            logprobs_BK, _ = token_logprobs(model, row, 0.9, own)
            (-logprobs_BK.mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds[way].append(time.perf_counter() - began)
    return {way: statistics.median(each[1:]) for way, each in seconds.items()}


def line(name: str, unit: str, values: dict[str, float]) -> None:
    full, chunks = values["full logits"], values["chunks"]
    print(f"{name:<58}{full:>10.3f} {unit:<3}{chunks:>10.3f} {unit:<3}{chunks / full:>8.3f}", flush=True)


def main() -> None:
    print(__doc__)
    print(f"{'':<58}{'full logits':>14}{'chunks':>14}{'ratio':>8}")
    for tokens in (TOKENS, FITTING):
        line(f"tensors, {tokens:,} x {VOCABULARY:,}", "GB", {way: tensors(tokens, way) for way in WAYS})
    found = {way: process(FITTING, way) for way in WAYS}
    for n, (name, unit) in enumerate((("process", "GB"), ("process", "s"))):
        line(f"{name}, {FITTING:,} x {VOCABULARY:,}", unit, {way: values[n] for way, values in found.items()})
    gigabytes, seconds = process(TOKENS, "chunks")
    print(f"{f'process, {TOKENS:,} x {VOCABULARY:,}':<58}{'':>14}{gigabytes:>10.3f} GB")
    print(f"{f'process, {TOKENS:,} x {VOCABULARY:,}':<58}{'':>14}{seconds:>10.3f} s")
    tiny, _ = load(ModelConf(architecture=Architecture.qwen3_5_dense))
    gdn_packing.patch(tiny)
    for name, model, documents, count in (("embedded qwen3_5_dense", tiny, 32, 40), ("larger", larger_model(), 32, 8)):
        parameters = sum(p.numel() for p in model.parameters()) / 1e6
        line(f"update, {name}, {parameters:.1f} M parameters", "s", updates(model, documents, count))


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    torch.manual_seed(0)
    if sys.argv[1:]:
        forward_backward(int(sys.argv[1]), sys.argv[2], process_peak())
    else:
        main()
