"""Fused kernels under our boundaries against each document alone: on a GPU (test_gpu.py) and in Triton's interpreter.

Everything goes through our replacements of transformers' functions, so that what is checked is what a model is given.
Errors are relative to the largest value of the tensor compared.
"""

import contextlib
import importlib
import inspect

import torch
import torch.nn.functional as F
from packing_cases import OUT_OF_ORDER as DOCUMENTS
from packing_cases import without_boundaries
from transformers import AutoModelForCausalLM, KimiLinearConfig, Qwen3_5TextConfig

from posttrain.models.gdn_packing import PackingLeak, boundaries, patch, verify
from posttrain.models.packed import dispatch

SHAPE = dict(vocab_size=97, hidden_size=64, intermediate_size=64, num_attention_heads=2, num_hidden_layers=2)
SHAPE |= dict(initializer_range=0.1, pad_token_id=None, bos_token_id=None, eos_token_id=None)
SHAPE |= dict(layer_types=["linear_attention", "full_attention"])
CONFIGS = {
    "qwen3_5": Qwen3_5TextConfig(
        **SHAPE,
        num_key_value_heads=1,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
    ),
    "kimi_linear": KimiLinearConfig(
        **SHAPE,
        num_key_value_heads=2,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=4,  # all of them: a tie in the router, rounded differently, would look like a leak
        moe_intermediate_size=32,
        linear_head_dim=32,
        linear_num_heads=2,
    ),
}
RULES = {"qwen3_5": "torch_chunk_gated_delta_rule", "kimi_linear": "chunk_kimi_delta_attention"}


@contextlib.contextmanager
def kernels(device: str, fused: bool):
    """Our replacements with their fused side on or off on a type of device."""
    before = set(dispatch.FUSED_ON)
    (dispatch.FUSED_ON.add if fused else dispatch.FUSED_ON.discard)(device)
    try:
        yield
    finally:
        dispatch.FUSED_ON.clear()
        dispatch.FUSED_ON.update(before)


def build(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32):
    """A patched model of a stateful and an attention layer whose state decays by 0.993 a token."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    for key, parameter in model.named_parameters():
        if key.endswith(("A_log", "dt_bias")):
            torch.nn.init.constant_(parameter, -3.0 if key.endswith("A_log") else -2.0)
    patch(model, device)
    return model.to(device, dtype)


def module_of(name: str):
    """transformers' module of an architecture, patched."""
    build(name)
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def difference(found, wanted, floor: float = 0.0) -> float:
    """The largest relative difference of two lists of tensors, each measured by its own largest value."""
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(found, wanted, strict=True)]
    return max(float((a - b).abs().max()) / max(float(b.abs().max()), floor) for a, b in pairs)


def recurrence(query, key, value, g, beta):
    """One document token by token; query, key [T, H, K], value [T, HV, V], g [T, HV] or [T, HV, K], beta [T, HV].

    S <- e^g S, then S <- S + k (beta (v - S^T k))^T; o = S^T q / sqrt(K). q and k are normalised first.
    """
    query, key = (F.normalize(x, dim=-1).repeat_interleave(value.shape[1] // x.shape[1], 1) for x in (query, key))
    state, outputs = query.new_zeros(value.shape[1], key.shape[2], value.shape[2]), []
    decay = (g if g.dim() == 3 else g[..., None]).exp()
    for q, k, v, e, b in zip(query, key, value, decay, beta, strict=True):
        state = state * e[..., None]
        recalled = (state * k[..., None]).sum(1)
        state = state + k[..., None] * (b[:, None] * (v - recalled))[:, None]
        outputs.append((state * q[..., None]).sum(1) * key.shape[2] ** -0.5)
    return torch.stack(outputs)


def delta_rule(name: str, lengths, device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict:
    """The delta rule of an architecture, against a loop over tokens (in fp64) and our reference."""
    function, total, heads = getattr(module_of(name), RULES[name]), sum(lengths), 4 if name == "qwen3_5" else 2
    torch.manual_seed(1)
    query, key, value, beta = (
        x.to(device, dtype).requires_grad_()
        for x in (*torch.randn(2, 1, total, 2, 32), torch.randn(1, total, heads, 32), torch.rand(1, total, heads))
    )
    channels = () if name == "qwen3_5" else (32,)  # KDA decays each channel of the key by itself
    g = (-0.05 * torch.rand(1, total, heads, *channels)).to(device).requires_grad_()
    inputs = [query, key, value, g, beta]

    def run(where):
        return function(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True, **where)[0]

    def alone():
        documents = zip(*(x[0].double().split(lengths) for x in inputs), strict=True)
        return torch.cat([recurrence(*document) for document in documents])[None]

    return _compare(function, run, alone, inputs, lengths, device)


def convolution(
    lengths, bias: bool, activation: str | None, device: str = "cpu", dtype: torch.dtype = torch.float32, by_fla=False
) -> dict:
    """The short convolution of width 4, against conv1d on each document; `by_fla` even with causal-conv1d there."""
    function = module_of("qwen3_5").causal_conv1d_fn
    if by_fla:  # transformers' plain torch function has no fused kernel bound to it
        function = dispatch.dispatch("causal_conv1d_fn", inspect.unwrap(function))
    torch.manual_seed(1)
    x, weight, offset = torch.randn(1, 24, sum(lengths)), torch.randn(24, 4), torch.randn(24)
    inputs = [y.to(device, dtype).requires_grad_() for y in ((x, weight, offset) if bias else (x, weight))]

    def run(where):
        x, weight, *offset = inputs
        return function(x, weight, *offset, activation=activation, **where)

    def alone():
        x, weight, *offset = (y.double() for y in inputs)
        apart = [F.conv1d(F.pad(d, (3, 0)), weight[:, None], *offset, groups=24) for d in x.split(lengths, -1)]
        return torch.cat([F.silu(d) if activation else d for d in apart], -1)

    return _compare(function, run, alone, inputs, lengths, device)


def _compare(function, run, alone, inputs, lengths, device: str) -> dict:
    """Errors of the fused side against each document alone and against our reference side; and of a leaking one."""
    where = boundaries(lengths, device)
    with kernels(device, fused=True):
        packed, leaking = run(where), run({})
        upstream = torch.randn_like(packed)
        gradients = torch.autograd.grad(packed, inputs, upstream)
        kernel = dispatch.describe(function.kernel_for(torch.device(device)))
    with kernels(device, fused=False):
        reference = run(where)
    wanted = alone()
    expected = torch.autograd.grad(wanted, inputs, upstream.to(wanted))
    by_reference = torch.autograd.grad(reference, inputs, upstream)
    return {
        "kernels": [kernel],
        "outputs": difference([packed], [wanted]),
        "gradients": difference(gradients, expected, _floor(expected)),
        "reference_outputs": difference([packed], [reference]),
        "reference_gradients": difference(gradients, by_reference, _floor(expected)),
        "boundaries_dropped": difference([leaking], [wanted]),
    }


def _floor(gradients) -> float:
    """Some gradients are zero but for rounding (of the decay of one token, say): they are measured by the largest."""
    return 0.1 * max(float(gradient.abs().max()) for gradient in gradients)


def whole_model(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32, alone_fused: bool = False) -> dict:
    """A packed row on the fused kernels against each document in an ordinary call of its own, and one after it.

    `alone_fused`: the documents' own calls on the same kernels, so that in bf16 both round alike; else on torch's.
    """
    model = build(name, device, dtype)
    parameters = list(model.parameters())
    ids = torch.randint(97, (sum(DOCUMENTS),), generator=torch.Generator().manual_seed(1)).to(device)
    with kernels(device, fused=alone_fused):
        apart = [model(input_ids=part[None], use_cache=False).logits[0] for part in ids.split(DOCUMENTS)]
        alone = torch.cat(apart)
        upstream = torch.randn_like(alone)
        wanted = torch.autograd.grad(alone, parameters, upstream)
    with kernels(device, fused=True):
        packed = model(input_ids=ids[None], **boundaries(DOCUMENTS, device)).logits[0]
        gradients = torch.autograd.grad(packed, parameters, upstream)
        with torch.no_grad():
            after = model(input_ids=ids[None, : DOCUMENTS[0]], use_cache=False).logits[0]
        report = patch(model, device)
    return {
        "kernels": sorted(set(report.kernels.values())),
        "outputs": difference([packed], [alone]),
        "gradients": difference(gradients, wanted, _floor(wanted)),
        "after_a_packed_row": difference([after], [apart[0]]),
    }


def probe(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict:
    """What `verify` finds on the fused kernels."""
    with kernels(device, fused=True):
        proof = verify(build(name, device, dtype))
    return {"kernels": sorted(set(proof.kernels.values())), "difference": proof.max_difference}


def forgetful_model(name: str, device: str = "cpu") -> dict:
    """The same row when the delta rule's boundaries are lost on the way, and what `verify` then says."""
    model, module = build(name, device), module_of(name)
    function = getattr(module, RULES[name])
    ids = torch.randint(97, (1, sum(DOCUMENTS)), generator=torch.Generator().manual_seed(1)).to(device)
    with kernels(device, fused=True), torch.no_grad():
        packed = model(input_ids=ids, **boundaries(DOCUMENTS, device)).logits
        setattr(module, RULES[name], without_boundaries(function))
        try:
            leaking = model(input_ids=ids, **boundaries(DOCUMENTS, device)).logits
            verify(model)
        except PackingLeak as leak:
            refused = str(leak)
        else:
            refused = ""
        finally:
            setattr(module, RULES[name], function)
    return {"boundaries_dropped": difference([leaking], [packed]), "refused": refused}
