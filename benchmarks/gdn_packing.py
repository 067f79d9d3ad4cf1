"""What it costs to keep documents apart: the reference kernels against upstream's torch functions, which leak.

    python benchmarks/gdn_packing.py [--repeats 7] [--threads 1]

Forward and backward, fp32, on the CPU. Each pair runs in turn; the ratio is that of the medians. For attention the
usual way to pack, a mask of [T, T], is measured too.
"""

import argparse
import importlib
import inspect
import statistics
import time

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from posttrain.models.packed import kernels
from posttrain.models.packed.attention import attention_by_document

LENGTHS = {
    "[700, 5, 9, 300, 1, 1, 33, 999]": (700, 5, 9, 300, 1, 1, 33, 999),
    "64 x 32": (32,) * 64,
    "1500 + 55 x 10": (1500, *(10,) * 55),
}
HEADS, WIDTH, CHANNELS = 4, 64, 768  # about the cost per token of a small model's layer


def upstream(name: str, function: str):
    return inspect.unwrap(getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), function))


def operations(tokens: int) -> dict:
    """name -> (the leaking row, the row by document, its inputs); both take the inputs, the second also lengths."""
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    heads = [made(1, tokens, HEADS, WIDTH) for _ in range(3)]
    rate = torch.rand(1, tokens, HEADS, generator=generator).requires_grad_()
    decay = (-0.05 * torch.rand(1, tokens, HEADS, generator=generator)).requires_grad_()
    decays = (-0.05 * torch.rand(1, tokens, HEADS, WIDTH, generator=generator)).requires_grad_()
    gdn, kda = (
        upstream(*f)
        for f in (("qwen3_5", "torch_chunk_gated_delta_rule"), ("kimi_linear", "chunk_kimi_delta_attention"))
    )
    ssd, conv = upstream("bamba", "mamba2_chunk_scan"), upstream("qwen3_5", "causal_conv1d_fn")
    A = -torch.rand(HEADS, generator=generator)
    scan = [heads[0], rate, heads[1], heads[2]]
    x, weight = made(1, tokens, CHANNELS).detach().transpose(1, 2).requires_grad_(), made(CHANNELS, 4)
    norm = dict(use_qk_l2norm_in_kernel=True)
    attend, attend_by_document = (
        lambda q, k, v, f=f, **packed: f(nn.Identity(), *(x.transpose(1, 2) for x in (q, k, v)), None, **packed)[0]
        for f in (sdpa_attention_forward, attention_by_document(sdpa_attention_forward))
    )
    return {
        "attention": (
            attend,
            lambda lengths, *a: attend_by_document(*a, document_lengths=lengths),
            heads,
        ),
        "attention with a mask": (attend, lambda lengths, *a: masked_attention(lengths, *a), heads),
        "gated delta rule": (
            lambda q, k, v, g, b: gdn(q, k, v, g=g, beta=b, **norm)[0],
            lambda lengths, *a: kernels.delta_rule(gdn, *a, lengths, **norm)[0],
            [*heads, decay, rate],
        ),
        "Kimi delta attention": (
            lambda q, k, v, g, b: kda(q, k, v, g=g, beta=b, **norm)[0],
            lambda lengths, *a: kernels.delta_rule(kda, *a, lengths, **norm)[0],
            [*heads, decays, rate],
        ),
        "state space scan": (
            lambda h, dt, b, c: ssd(h, dt, A, b, c, chunk_size=256),
            lambda lengths, h, dt, b, c: kernels.state_space_scan(ssd, h, dt, A, b, c, 256, lengths),
            scan,
        ),
        "state space scan, leaking row in chunks of 64 too": (
            lambda h, dt, b, c: ssd(h, dt, A, b, c, chunk_size=64),
            lambda lengths, h, dt, b, c: kernels.state_space_scan(ssd, h, dt, A, b, c, 256, lengths),
            scan,
        ),
        "short convolution": (
            lambda x, w: conv(x, w, None, activation="silu"),
            lambda lengths, x, w: kernels.causal_conv1d(x, w, None, "silu", lengths),
            [x, weight],
        ),
    }


def masked_attention(lengths: tuple[int, ...], *heads: torch.Tensor) -> torch.Tensor:
    """What packing costs without `attention by document`: sdpa with a mask of [T, T], made once a forward."""
    number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    mask = (number[:, None] == number).tril()[None, None]
    return sdpa_attention_forward(nn.Identity(), *(x.transpose(1, 2) for x in heads), mask)[0]


def milliseconds(function, inputs: list) -> float:
    began = time.perf_counter()
    torch.autograd.grad(function(*inputs).sum(), inputs)
    return 1000 * (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("| operation | documents | leaking row ms | packed ms | ratio |\n|---|---|---|---|---|")
    for label, lengths in LENGTHS.items():
        for name, (leaking, packed, inputs) in operations(sum(lengths)).items():
            times = []
            for _ in range(args.repeats + 1):
                times.append(
                    (milliseconds(leaking, inputs), milliseconds(lambda *a: packed(lengths, *a), inputs))  # noqa: B023
                )
            row, apart = (statistics.median(column) for column in zip(*times[1:], strict=True))
            print(f"| {name} | {label} | {row:.1f} | {apart:.1f} | {apart / row:.2f} |", flush=True)


if __name__ == "__main__":
    main()
