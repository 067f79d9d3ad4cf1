"""What only a CUDA device shows: the fused kernels, bf16, and the peak table."""

import dataclasses
import time

import fused_cases
import pytest
import torch
from conftest import SMALL, command
from packing_cases import LONGER_THAN_A_BLOCK, MIXED, ONE_TOKEN_EACH, OUT_OF_ORDER

from posttrain import logprobs, packing
from posttrain.config import Architecture, ModelConf, PackingConf, PackingMode
from posttrain.metrics.peaks import peak_tflops
from posttrain.models import gdn_packing
from posttrain.models.head import find_head
from posttrain.models.loading import load
from posttrain.records import Rollout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HYBRIDS = [Architecture.qwen3_5_dense, Architecture.qwen3_5_moe, Architecture.qwen3_next]
DTYPES = [torch.bfloat16, torch.float32]
# Relative to the largest value: inputs of fp32 are multiplied with 10 bits of mantissa, those of bf16 have 8.
TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.03}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", list(Architecture)[1:])
def test_packing_cannot_leak_on_the_device(architecture, dtype):
    model, _ = load(ModelConf(architecture=architecture))
    gdn_packing.patch(model, "cuda")
    proof = gdn_packing.verify(model, "cuda", dtype)
    assert proof.max_difference < proof.tolerance


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_the_device_agrees_with_the_cpu(architecture):
    model, _ = load(ModelConf(architecture=architecture))
    gdn_packing.patch(model, "cpu")
    lengths = MIXED
    ids = torch.randint(0, 256, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model(input_ids=ids, **gdn_packing.boundaries(lengths, "cpu")).logits
        found = model.cuda()(input_ids=ids.cuda(), **gdn_packing.boundaries(lengths, "cuda")).logits.cpu()
    assert (found - wanted).abs().max() < 2e-2 * wanted.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", list(Architecture)[1:])
def test_logprobs_by_chunks_equal_full_logits(architecture, dtype, monkeypatch):
    model, _ = load(ModelConf(architecture=architecture))
    gdn_packing.patch(model, "cuda")
    head = find_head(model)
    assert head.linear is not None, head.description
    model = model.to("cuda", dtype)
    rollouts = [
        Rollout.one_turn(
            prompt_ids=(5, 6), completion_ids=ids, logprobs=(0.0,) * len(ids), finish_reason="stop", group=0
        )
        for ids in ((7,), tuple(range(20, 90)))
    ]
    documents = [packing.Document(rollout=r, advantage=1.0, weight=1.0, index=n) for n, r in enumerate(rollouts)]
    conf = PackingConf(mode=PackingMode.thd)
    row = packing.build(documents, conf, 257, torch.device("cuda", 0))
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 4 * 71 * 128)  # three chunks
    wanted, found = {}, {}
    for way, values in ((dataclasses.replace(head, linear=None), wanted), (head, found)):
        values["logprobs"], values["entropy"] = logprobs.token_logprobs(model, row, 0.7, way, entropy_gradient=True)
        (values["logprobs"] + 0.1 * values["entropy"]).sum().backward()
        values["gradient"] = model.get_output_embeddings().weight.grad.float().clone()
        model.zero_grad()
    for name, value in wanted.items():
        assert (found[name] - value).abs().max() < TOLERANCE[dtype] * value.abs().max(), name


def assert_each_document_alone(found, dtype):
    assert max(found["outputs"], found["reference_outputs"]) < TOLERANCE[dtype]
    assert max(found["gradients"], found["reference_gradients"]) < 2 * TOLERANCE[dtype]
    assert found["boundaries_dropped"] > 0.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [OUT_OF_ORDER, ONE_TOKEN_EACH], ids=["mixed", "one_token_each"])
@pytest.mark.parametrize(("name", "kernel"), [("qwen3_5", "chunk_gated_delta_rule"), ("kimi_linear", "chunk_kda")])
def test_fused_delta_rules_equal_each_document_alone(name, kernel, lengths, dtype):
    found = fused_cases.delta_rule(name, lengths, "cuda", dtype)
    assert found["kernels"][0].endswith(kernel)
    assert_each_document_alone(found, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [OUT_OF_ORDER, ONE_TOKEN_EACH, LONGER_THAN_A_BLOCK], ids=len)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("by_fla", [False, True])
def test_fused_convolutions_equal_each_document_alone(by_fla, bias, lengths, dtype):
    """causal-conv1d where it is installed, and flash-linear-attention's in any case."""
    found = fused_cases.convolution(lengths, bias, "silu", "cuda", dtype, by_fla=by_fla)
    assert found["kernels"] != ["reference (torch)"]
    assert_each_document_alone(found, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", fused_cases.CONFIGS)
def test_a_packed_row_equals_its_documents_in_calls_of_their_own(name, dtype):
    """Logits, gradients, and a single document after the packed row."""
    found = fused_cases.whole_model(name, "cuda", dtype, alone_fused=True)
    assert "reference (torch)" not in found["kernels"]
    assert max(found["outputs"], found["after_a_packed_row"]) < TOLERANCE[dtype]
    assert found["gradients"] < 0.1


def test_boundaries_that_do_not_reach_a_fused_kernel_are_noticed():
    found = fused_cases.forgetful_model("qwen3_5", "cuda")
    assert found["boundaries_dropped"] > 0.1
    assert "Qwen3_5GatedDeltaNet" in found["refused"]


@pytest.fixture
def no_waiting():
    """From here on whatever makes the host wait for the device raises."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def test_waiting_for_the_device_raises_where_it_is_forbidden(no_waiting):
    number = torch.ones((), device="cuda")
    no_waiting()
    with pytest.raises(RuntimeError, match="synchroniz"):
        number.item()


@pytest.mark.parametrize("name", [*HYBRIDS, "kimi_linear"])
def test_a_packed_forward_never_waits_for_the_device(name, no_waiting):
    """Of rows with the same boundaries: the first one copies its indices from the host and tunes the kernels."""
    model = fused_cases.build(name, "cuda") if name == "kimi_linear" else load(ModelConf(architecture=name))[0].cuda()
    gdn_packing.patch(model, "cuda")
    where = gdn_packing.boundaries(OUT_OF_ORDER, "cuda")
    ids = torch.arange(sum(OUT_OF_ORDER), device="cuda")[None] % 97
    model(input_ids=ids, **where).logits.sum().backward()
    torch.cuda.synchronize()
    no_waiting()
    model(input_ids=ids, **where)


@pytest.mark.parametrize("packing", ["thd", "padded"])
def test_the_recipe_trains(tmp_path, packing):
    process = command("grpo", *SMALL, "launch.nproc=1", f"packing={packing}", f"hydra.run.dir={tmp_path / 'run'}")
    assert process.returncode == 0, process.stdout


def test_a_measured_matmul_lies_below_the_table_peak():
    peak, _ = peak_tflops(None, torch.device("cuda"), torch.bfloat16)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(5):
        a @ a
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        a @ a
    torch.cuda.synchronize()
    measured = 20 * 2 * 8192**3 / (time.perf_counter() - began) / 1e12
    assert 0.4 * peak < measured < 1.05 * peak
