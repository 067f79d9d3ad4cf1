"""Packed rows equal their documents alone, and the probe sees every way of breaking that.

Tiny random models with slow decay, so that a state left over from another document is loud. fp32 on the CPU.
"""

import functools
import importlib
import inspect

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    MambaConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from posttrain.errors import UserError
from posttrain.models import gdn_packing, shrink
from posttrain.models.gdn_packing import PackingLeak, boundaries, patch, verify
from posttrain.models.packed import dispatch
from posttrain.models.packed.boundaries import BOUNDARIES, documents

DOCUMENTS = (1, 2, 13, 17, 64, 65)
SHAPE = dict(
    vocab_size=97,
    hidden_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_hidden_layers=4,
    initializer_range=0.1,
    pad_token_id=None,
)
DELTA_NET = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
CONFIGS = {
    "qwen3_5": Qwen3_5TextConfig(**SHAPE, **DELTA_NET, intermediate_size=64),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**SHAPE, **DELTA_NET, **EXPERTS),
    "qwen3_next": Qwen3NextConfig(**SHAPE, **DELTA_NET, **EXPERTS, intermediate_size=64),
    "qwen3": Qwen3Config(**SHAPE, intermediate_size=64),
    "llama": LlamaConfig(**SHAPE, intermediate_size=64),
}
DELTA_NET_FUNCTIONS = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
)
HYBRIDS = ["qwen3_5", "qwen3_5_moe", "qwen3_next"]


def build(name, seed=0):
    """A model whose state decays by 0.993 a token (A = 0.05), patched."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIGS[name])
    for key, parameter in model.named_parameters():
        if key.endswith("A_log"):
            torch.nn.init.constant_(parameter, -3.0)
        if key.endswith("dt_bias"):
            torch.nn.init.constant_(parameter, -2.0)
    patch(model)
    return model.eval()


def tokens(count, seed=0):
    return torch.randint(97, (count,), generator=torch.Generator().manual_seed(seed))


def packed(model, ids, lengths):
    return model(input_ids=ids[None], **boundaries(lengths, "cpu")).logits[0]


def alone(model, ids, lengths):
    """Each document in its own ordinary call, with no boundaries at all: upstream's single-sequence path."""
    return torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in ids.split(lengths)])


def gradients(model, logits, seed=5):
    target = torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    (logits * target).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same(actual, expected, tolerance=1e-4):
    assert actual.isfinite().all()
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


def assert_same_gradients(actual, expected):
    """Some are zero but for rounding (queries of one-token documents): measured by the largest of all."""
    floor = 0.01 * max(gradient.abs().max() for gradient in expected.values())
    for name, wanted in expected.items():
        assert (actual[name] - wanted).abs().max() <= 1e-4 * max(wanted.abs().max(), floor), name


@pytest.fixture(scope="module")
def models():
    return {name: build(name) for name in CONFIGS}


@pytest.fixture
def module(models, request):
    """The modeling module of dense qwen3_5, to be broken with monkeypatch."""
    return importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")


# ----------------------------------------------------------------------------------------------- boundaries


def test_boundaries_by_hand():
    made = boundaries([1, 3, 2], "cpu")
    assert made["position_ids"].tolist() == [[0, 0, 1, 2, 0, 1]] and made["position_ids"].dtype == torch.int64
    assert made["seq_idx"].tolist() == [[0, 1, 1, 1, 2, 2]] and made["seq_idx"].dtype == torch.int32
    assert made["cu_seq_lens_q"].tolist() == made["cu_seq_lens_k"].tolist() == [0, 1, 4, 6]
    assert made["cu_seq_lens_q"].dtype == torch.int32
    assert made["max_length_q"] == made["max_length_k"] == 3
    assert made["document_lengths"] == (1, 3, 2) and made["use_cache"] is False


@pytest.mark.parametrize("lengths", [[], [0], [3, 0, 2], [3, -1]])
def test_boundaries_refuse_empty_documents(lengths):
    with pytest.raises(ValueError, match="at least one token"):
        boundaries(lengths, "cpu")


def test_boundaries_take_whole_numbers_only():
    with pytest.raises(TypeError):
        boundaries([1.5], "cpu")


def test_boundaries_that_do_not_fill_the_row_are_refused(models):
    for lengths in [(5, 4), (5, 6)]:
        kwargs = boundaries(lengths, "cpu")
        kwargs["position_ids"] = torch.arange(10)[None]
        with pytest.raises(ValueError, match="must fill one row"):
            models["qwen3_5"](input_ids=tokens(10)[None], **kwargs)
    with pytest.raises(ValueError, match="use_cache=False"):
        models["qwen3_5"](input_ids=tokens(10)[None], **boundaries([4, 6], "cpu") | {"use_cache": True})
    with pytest.raises(ValueError, match="start at 0"):
        documents({"cu_seqlens": torch.tensor([2, 10])}, 1, 10)
    with pytest.raises(ValueError, match="2 document_lengths"):
        documents({"cu_seqlens": torch.tensor([0, 10]), "document_lengths": (4, 6)}, 1, 10)


# ------------------------------------------------------------------------------- packed equals separate


@pytest.mark.parametrize("lengths", [DOCUMENTS, (1,) * 64], ids=["mixed", "one_token_each"])
@pytest.mark.parametrize("name", CONFIGS)
def test_packed_equals_separate(models, name, lengths):
    model, ids = models[name], tokens(sum(lengths))
    one_row, apart = packed(model, ids, lengths), alone(model, ids, lengths)
    assert_same(one_row, apart)
    assert_same_gradients(gradients(model, one_row), gradients(model, apart))


@pytest.mark.parametrize("name", HYBRIDS)
@torch.no_grad()
def test_single_document_after_a_packed_row(models, name):
    model = models[name]
    for lengths in [(10, 20), (17,), (30,), (13, 17), (64,), (65,), (10, 20)]:
        ids = tokens(sum(lengths), seed=len(lengths))
        assert_same(packed(model, ids, lengths), alone(model, ids, lengths))
        plain = model(input_ids=ids[None], use_cache=False).logits[0]  # nothing is left of the boundaries
        assert_same(plain, alone(model, ids, [len(ids)]), 0)


@torch.no_grad()
def test_order_of_documents_does_not_matter(models):
    parts = [tokens(length, seed=length) for length in DOCUMENTS]
    whole = packed(models["qwen3_5"], torch.cat(parts), DOCUMENTS).split(DOCUMENTS)
    for order in [(5, 4, 3, 2, 1, 0), (2, 0, 5, 1, 4, 3)]:
        lengths = [DOCUMENTS[i] for i in order]
        again = packed(models["qwen3_5"], torch.cat([parts[i] for i in order]), lengths).split(lengths)
        for i, logits in zip(order, again, strict=True):
            assert_same(logits, whole[i])


@torch.no_grad()
def test_tail_padding_is_a_document_of_its_own(models):
    """10 real tokens and 2048 of padding; and duplicate tail offsets (no document) from another caller."""
    model, ids = models["qwen3_5"], tokens(10)
    row = torch.cat([ids, torch.zeros(2048, dtype=torch.long)])
    assert_same(packed(model, row, (10, 2048))[:10], alone(model, ids, [10]))
    foreign = boundaries([4, 6], "cpu")
    del foreign["document_lengths"]
    foreign["cu_seq_lens_q"] = torch.tensor([0, 4, 10, 10], dtype=torch.int32)
    assert_same(model(input_ids=ids[None], **foreign).logits[0], alone(model, ids, [4, 6]))


@torch.no_grad()
def test_a_foreign_call_without_host_lengths(models):
    """cu_seq_lens_q or seq_idx alone are enough to know the documents, for both kernels."""
    model, ids = models["qwen3_5"], tokens(30)
    expected = alone(model, ids, [13, 2, 15])
    made = boundaries([13, 2, 15], "cpu")
    made["seq_idx"] = made["seq_idx"].clone()  # without the lengths that ours carries
    for missing in ("seq_idx", "document_lengths"), ("document_lengths",):
        kwargs = {k: v for k, v in made.items() if k not in missing}
        assert_same(model(input_ids=ids[None], **kwargs).logits[0], expected)


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(name, use_reentrant):
    lengths = (13, 2, 65)
    ids = tokens(sum(lengths))
    model = build(name)
    expected = gradients(model, alone(model, ids, lengths))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.train().enable_input_require_grads()
    one_row = packed(model, ids, lengths)
    packed(model, tokens(80, seed=3), (40, 40))  # a later row must not reach the recomputation of the first
    assert_same_gradients(gradients(model, one_row), expected)


@pytest.mark.parametrize("name", HYBRIDS)
@torch.no_grad()
def test_padded_batch_equals_alone(models, name):
    model, lengths = models[name], (3, 65, 20)
    parts = tokens(sum(lengths)).split(lengths)
    ids = torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
    mask = (torch.arange(65) < torch.tensor(lengths)[:, None]).long()
    positions = torch.arange(65).expand(3, -1)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    for row, part in zip(logits, parts, strict=True):
        assert_same(row[: len(part)], alone(model, part, [len(part)]))


@pytest.mark.parametrize("name", HYBRIDS)
@torch.no_grad()
def test_decoding_with_a_cache_equals_the_full_forward(models, name):
    model, ids = models[name], tokens(24).view(2, 12)
    full = model(input_ids=ids, use_cache=False).logits
    for prompt in (1, 2, 7):  # also prompts shorter than the convolution
        step = model(input_ids=ids[:, :prompt], use_cache=True)
        logits = [step.logits]
        for position in range(prompt, 12):
            cache = step.past_key_values
            step = model(input_ids=ids[:, position : position + 1], past_key_values=cache, use_cache=True)
            logits.append(step.logits)
        assert_same(torch.cat(logits, 1), full)


def test_generation_in_inference_mode_then_training(models):
    """Plans are cached across calls; one made in inference mode must be usable by autograd."""
    model, lengths, ids = models["qwen3_5"], (7, 9, 3), tokens(19)
    with torch.inference_mode():
        packed(model, ids, lengths)
        model.generate(ids[None, :7], max_new_tokens=2, do_sample=False)
    assert_same_gradients(gradients(model, packed(model, ids, lengths)), gradients(model, alone(model, ids, lengths)))


# ---------------------------------------------------------------------------------------- reference kernels


def naive_delta_rule(q, k, v, g, beta):
    """One document, token by token: S <- e^g S + k (beta (v - S^T k))^T after decay; o = S^T q / sqrt(K)."""
    q, k = (F.normalize(x, dim=-1, eps=1e-6).repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    state, outputs = torch.zeros(v.shape[1], k.shape[-1], v.shape[-1], dtype=q.dtype), []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        recalled = torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * (v[t] - recalled))
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]) * q.shape[-1] ** -0.5)
    return torch.stack(outputs)


def delta_rule_inputs(total, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, total, 4, 16, generator=generator) for _ in range(3))
    g = -0.05 * torch.rand(1, total, 4, generator=generator)
    beta = torch.rand(1, total, 4, generator=generator)
    return [x.to(dtype).requires_grad_() for x in (q, k, v)] + [
        g.requires_grad_(),
        beta.to(dtype).requires_grad_(),
    ]


@pytest.mark.parametrize("lengths", [DOCUMENTS, (1,) * 64, (130, 1, 5), (3, 3, 3, 3)])
def test_reference_delta_rule_equals_the_recurrence(models, module, lengths):
    q, k, v, g, beta = inputs = delta_rule_inputs(sum(lengths))
    rule = module.torch_chunk_gated_delta_rule
    out, state = rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, document_lengths=lengths)
    documents = zip(*(x[0].split(lengths) for x in inputs), strict=True)
    expected = torch.cat([naive_delta_rule(*document) for document in documents])[None]
    assert state is None
    assert_same(out, expected, 1e-5)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    found, wanted = (torch.autograd.grad((x * weights).sum(), inputs) for x in (out, expected))
    for one, other in zip(found, wanted, strict=True):
        assert_same(one, other, 2e-5)


def test_reference_delta_rule_in_bf16(models, module):
    """The state is fp32 inside: the error is that of rounding inputs and output, not of 65 rounded steps."""
    q, k, v, g, beta = inputs = delta_rule_inputs(sum(DOCUMENTS), torch.bfloat16)
    rule = module.torch_chunk_gated_delta_rule
    out, _ = rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, document_lengths=DOCUMENTS)
    documents = zip(*(x[0].double().split(DOCUMENTS) for x in inputs), strict=True)
    assert out.dtype == torch.bfloat16
    assert_same(out.double(), torch.cat([naive_delta_rule(*d) for d in documents])[None], 2**-7)


def test_packed_documents_have_no_common_state(models, module):
    q, k, v, g, beta = delta_rule_inputs(9)
    for state in ({"output_final_state": True}, {"initial_state": torch.zeros(1, 4, 16, 16)}):
        with pytest.raises(ValueError, match="share a recurrent state"):
            module.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, document_lengths=(4, 5), **state)


@pytest.mark.parametrize("width", [2, 4, 7])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("contiguous", [False, True])
def test_reference_convolution_equals_each_document(models, module, width, with_bias, contiguous):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, sum(DOCUMENTS), 6, generator=generator).transpose(1, 2)
    x = (x.contiguous() if contiguous else x).requires_grad_()
    weight = torch.randn(6, width, generator=generator, requires_grad=True)
    bias = torch.randn(6, generator=generator, requires_grad=True) if with_bias else None
    out = module.causal_conv1d_fn(x, weight, bias, activation="silu", document_lengths=DOCUMENTS)
    expected = torch.cat(
        [
            F.silu(F.conv1d(F.pad(part, (width - 1, 0)), weight[:, None], bias, groups=6))
            for part in x.split(DOCUMENTS, dim=-1)
        ],
        dim=-1,
    )
    assert out.shape == x.shape
    assert_same(out, expected, 1e-6)
    inputs = [x, weight] + [bias] * with_bias
    found, wanted = (torch.autograd.grad(y.square().sum(), inputs) for y in (out, expected))
    for one, other in zip(found, wanted, strict=True):
        assert_same(one, other, 1e-5)


def test_calls_without_boundaries_are_upstreams_own(models, module):
    q, k, v, g, beta = delta_rule_inputs(2 * 40)
    batch = [x.detach().view(2, 40, *x.shape[2:]) for x in (q, k, v)]
    rates = dict(g=g.detach().view(2, 40, 4), beta=beta.detach().view(2, 40, 4))
    ours = module.torch_chunk_gated_delta_rule
    for one, other in zip(
        ours(*batch, **rates, output_final_state=True),
        inspect.unwrap(ours)(*batch, **rates, output_final_state=True),
        strict=True,
    ):
        assert torch.equal(one, other)


# --------------------------------------------------------------------------------------------------- patch


def test_patch_is_idempotent_and_reports(models, module):
    before = {name: getattr(module, name) for name in DELTA_NET_FUNCTIONS}
    report = patch(models["qwen3_5"])
    assert report == patch(models["qwen3_5"])
    assert all(getattr(module, name) is function for name, function in before.items())
    assert report.layers == {"Qwen3_5GatedDeltaNet": 3} and not report.warnings
    assert report.kernels["gated_delta_rule"] == report.kernels["causal_conv1d"] == "reference (torch)"


def test_attention_only_needs_no_patch(models):
    report = patch(models["llama"])
    assert report.layers == {} and set(report.kernels) == {"attention"}


def test_a_model_that_cannot_be_packed_is_refused_by_name():
    model = AutoModelForCausalLM.from_config(MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=32))
    with pytest.raises(UserError, match=r"MambaForCausalLM.*MambaMixer.*packing=padded"):
        patch(model)
    assert patch(model, packed=False).layers == {"MambaMixer": 1}


@pytest.mark.parametrize("version", ["4.57.1", "5.14.2", "6.0.0"])
def test_other_versions_of_transformers_are_refused(models, monkeypatch, version):
    monkeypatch.setattr(transformers, "__version__", version)
    with pytest.raises(UserError, match=rf"transformers {version} is installed.*>=5.15,<6"):
        patch(models["qwen3_5"])


def test_hub_kernels_are_refused(monkeypatch, models):
    monkeypatch.setattr(type(models["qwen3_5"]), "use_kernels", True)
    with pytest.raises(UserError, match="use_kernels=True.*Qwen3_5GatedDeltaNet"):
        patch(models["qwen3_5"])


def bound_at_import(raw, implementation):
    """What transformers makes of a torch function and a package: the kernel is fixed at import."""
    applicable = tuple(inspect.signature(implementation).parameters)

    @functools.wraps(raw)
    def wrapped(*args, **kwargs):
        return implementation(*args, **{k: v for k, v in kwargs.items() if k in applicable})

    return wrapped


@pytest.mark.parametrize("with_kernels_package", [False, True])
@torch.no_grad()
def test_a_gpu_kernel_bound_on_a_machine_without_gpu(models, module, monkeypatch, with_kernels_package):
    """triton and fla importable, no driver: upstream dies in the first forward; patched, it runs."""

    def no_driver(q, k, v, g, beta, cu_seqlens=None, **kwargs):
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    model, ids, function = models["qwen3_5"], tokens(30), None
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        function = bound_at_import(inspect.unwrap(getattr(module, name)), no_driver)
        if with_kernels_package:  # wraps functions in modules

            def as_module(func):
                class Func(torch.nn.Module):
                    def forward(self, *args, **kwargs):
                        return func(*args, **kwargs)

                return Func()

            function = as_module(function)
        monkeypatch.setattr(module, name, function)
    with pytest.raises(RuntimeError, match="0 active drivers"):
        model(input_ids=ids[None], use_cache=False)
    patch(model)
    assert_same(packed(model, ids, (13, 17)), alone(model, ids, (13, 17)))
    model.generate(ids[None], max_new_tokens=3, do_sample=False)
    on_gpu = module.torch_chunk_gated_delta_rule.kernel_for(torch.device("cuda"))
    assert on_gpu is no_driver and module.torch_chunk_gated_delta_rule.kernel_for(torch.device("cpu")) is None


@pytest.mark.parametrize("convolution", ["causal_conv1d", "fla"])
@torch.no_grad()
def test_fused_kernels_receive_the_boundaries(models, module, monkeypatch, convolution):
    """Kernels of the real signatures, written as loops over documents, run where `FUSED_ON` says."""
    calls = []

    def chunk_gated_delta_rule(
        q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None,
    ):  # fmt: skip
        calls.append("delta rule")
        assert use_qk_l2norm_in_kernel and scale is None and initial_state is None
        if cu_seqlens is None:
            return torch.stack([naive_delta_rule(*row) for row in zip(q, k, v, g, beta, strict=True)]), None
        assert cu_seqlens.tolist() == cu_seqlens_cpu.tolist()
        lengths = cu_seqlens.diff().tolist()
        documents = zip(*(x[0].split(lengths) for x in (q, k, v, g, beta)), strict=True)
        return torch.cat([naive_delta_rule(*document) for document in documents])[None], None

    def conv(x, weight, bias, lengths, activation):
        parts = [F.conv1d(F.pad(p, (3, 0)), weight[:, None], bias, groups=len(weight)) for p in x.split(lengths, -1)]
        return F.silu(torch.cat(parts, -1)) if activation == "silu" else torch.cat(parts, -1)

    def causal_conv1d_fn(
        x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False,
        final_states_out=None, activation=None,
    ):  # fmt: skip
        calls.append("convolution")
        if seq_idx is None:
            return conv(x, weight, bias, [x.shape[-1]], activation)
        assert x.stride(1) == 1 and seq_idx.dtype == torch.int32 and seq_idx.shape == (1, x.shape[-1])
        return conv(x, weight, bias, torch.unique_consecutive(seq_idx, return_counts=True)[1].tolist(), activation)

    def fla_causal_conv1d(x, weight=None, bias=None, activation=None, cu_seqlens=None, cu_seqlens_cpu=None):
        calls.append("convolution")
        lengths = [x.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
        return conv(x.transpose(1, 2), weight, bias, lengths, activation).transpose(1, 2), None

    fla_causal_conv1d.__module__ = "fla.modules.causal_conv1d"
    raw = {name: inspect.unwrap(getattr(module, name)) for name in DELTA_NET_FUNCTIONS}
    bound = {"torch_chunk_gated_delta_rule": chunk_gated_delta_rule}
    if convolution == "causal_conv1d":
        bound["causal_conv1d_fn"] = causal_conv1d_fn
    for name, function in raw.items():
        monkeypatch.setattr(module, name, bound_at_import(function, bound.get(name, function)))
    monkeypatch.setattr(dispatch, "fla_convolution", lambda: fla_causal_conv1d)
    model, ids = models["qwen3_5"], tokens(30)
    patch(model)
    expected = alone(model, ids, (13, 2, 15))
    assert not calls
    monkeypatch.setattr(dispatch, "FUSED_ON", {"cpu"})
    assert_same(packed(model, ids, (13, 2, 15)), expected)
    assert_same(alone(model, ids, (13, 2, 15)), expected)
    assert calls.count("delta rule") == calls.count("convolution") == 3 * (1 + 3)
    foreign = {k: v for k, v in boundaries((13, 2, 15), "cpu").items() if k != "document_lengths"}
    foreign["cu_seq_lens_q"] = torch.tensor([0, 13, 15, 30, 30], dtype=torch.int32)  # an empty document
    assert_same(model(input_ids=ids[None], **foreign).logits[0], expected)
    assert patch(model).kernels["gated_delta_rule"].endswith("chunk_gated_delta_rule")


# -------------------------------------------------------------------------------------------------- verify


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_probe_passes_quickly_and_leaves_no_trace(models, name, dtype):
    model = models[name]
    torch.manual_seed(7)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    config, random_state = model.config.to_dict(), torch.get_rng_state()
    proof = verify(model, dtype=dtype)
    assert torch.equal(torch.get_rng_state(), random_state) and model.config.to_dict() == config
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert proof.max_difference < proof.tolerance / 2
    assert proof.max_gradient_difference < proof.gradient_tolerance / 2
    assert sum(proof.layers.values()) == 4 and proof.kernels["attention"] == "sdpa by document"


def test_probe_keeps_the_head_widths_of_a_real_model():
    """Qwen3.5's own config, never allocated: the copy is thin, its kernels have the real shapes."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(num_hidden_layers=4))
    small = shrink.shrunk(model.config)
    assert small.layer_types == ["linear_attention", "full_attention"]
    for width in ("head_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"):
        assert getattr(small, width) == getattr(model.config, width)
    assert small.linear_num_value_heads == 2 * small.linear_num_key_heads
    assert small.num_attention_heads == 2 * small.num_key_value_heads


def without_boundaries(function):
    """The silent skip: a kernel that is called as if the row were one document."""

    def leaking(*args, **kwargs):
        return function(*args, **{k: v for k, v in kwargs.items() if k not in BOUNDARIES})

    leaking.kernel_for = function.kernel_for
    return leaking


def with_stale_boundaries(function):
    """Boundaries stored at a packed call and still there at the next, of one document."""
    stored = {}

    def leaking(*args, **kwargs):
        tokens_in_row = args[0].shape[2 if args[0].dim() == 3 else 1]
        if len(kwargs.get("document_lengths", ())) > 1:
            stored.update(document_lengths=kwargs["document_lengths"])
        stale = stored.get("document_lengths", ())
        kwargs = {k: v for k, v in kwargs.items() if k not in BOUNDARIES}
        return function(*args, **kwargs, **(stored if sum(stale) == tokens_in_row else {}))

    leaking.kernel_for = function.kernel_for
    return leaking


class Smear(torch.autograd.Function):
    """The identity; in backward every token's gradient also reaches its left neighbour."""

    @staticmethod
    def forward(ctx, x, tokens_dim):
        ctx.tokens_dim = tokens_dim
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad + grad.roll(-1, dims=ctx.tokens_dim), None


def with_leaking_gradient(function):
    def leaking(x, *args, **kwargs):
        return function(Smear.apply(x, -1), *args, **kwargs)

    leaking.kernel_for = function.kernel_for
    return leaking


def not_a_number(function):
    def broken(*args, **kwargs):
        return function(*args, **kwargs) * float("nan")

    broken.kernel_for = function.kernel_for
    return broken


def that_fails(function):
    def broken(*args, **kwargs):
        raise RuntimeError("seq_idx must have shape (batch_size, seqlen)")

    broken.kernel_for = function.kernel_for
    return broken


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["causal_conv1d_fn", "torch_chunk_gated_delta_rule"])
@pytest.mark.parametrize("breaks", [without_boundaries, with_stale_boundaries])
@pytest.mark.parametrize("name", HYBRIDS)
def test_probe_catches(models, monkeypatch, name, kernel, breaks, dtype):
    layer = next(layer for layer in models[name].modules() if hasattr(layer, "A_log"))
    module = importlib.import_module(type(layer).__module__)
    monkeypatch.setattr(module, kernel, breaks(getattr(module, kernel)))
    with pytest.raises(PackingLeak, match=rf"{type(layer).__name__} leaks.*packing=padded") as failure:
        verify(models[name], dtype=dtype)
    assert isinstance(failure.value, UserError) and "\n" not in str(failure.value)
    if breaks is with_stale_boundaries:
        assert "a packed row changes the row after it" in str(failure.value)


@pytest.mark.parametrize("breaks", [with_leaking_gradient, not_a_number, that_fails])
def test_probe_catches_in_one_kernel(models, module, monkeypatch, breaks):
    monkeypatch.setattr(module, "causal_conv1d_fn", breaks(module.causal_conv1d_fn))
    with pytest.raises(PackingLeak, match=r"Qwen3_5GatedDeltaNet .*packing=padded"):
        verify(models["qwen3_5"])


@pytest.mark.parametrize("name", ["qwen3_5", "llama"])
def test_probe_catches_attention_across_documents(models, monkeypatch, name):
    """What an all-ones mask or lost boundaries do: plain causal attention over the row."""
    genuine = AttentionInterface._global_mapping["sdpa"]

    def without_documents(*args, **kwargs):
        return genuine(*args, **{k: v for k, v in kwargs.items() if k not in BOUNDARIES})

    without_documents.by_document = True  # so that nobody mends it
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", without_documents)
    with pytest.raises(PackingLeak, match="Attention leaks between documents"):
        verify(models[name])


def test_probe_names_the_layer_whose_backward_leaks(models, module, monkeypatch):
    """Not the stateful layer below it, which the wrong gradient flows into."""
    rotate = module.apply_rotary_pos_emb
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, *rest: rotate(q, Smear.apply(k, -2), *rest))
    with pytest.raises(PackingLeak, match="Qwen3_5Attention leaks.*the gradient"):
        verify(models["qwen3_5"])


def test_probe_of_a_model_that_has_no_tiny_copy(models, monkeypatch):
    """The model itself is probed, forward only, and keeps its mode."""
    monkeypatch.setattr(gdn_packing, "tiny_copy", lambda *_: None)
    model = build("llama").train()
    proof = verify(model, "cpu")
    assert model.training and proof.max_difference < 1e-5 and proof.max_gradient_difference is None
    assert "LlamaForCausalLM has no tiny copy" in proof.warnings[0] and "forward only" in proof.warnings[0]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_no_import_of_fla_for_the_cpu(models):
    """flash-linear-attention costs seconds to import; its convolution is looked up on a GPU only."""
    verify(models["qwen3_5"])
    assert dispatch.fla_convolution.cache_info().currsize == 0
