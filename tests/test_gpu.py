"""What only a CUDA device shows: the fused kernels, bf16, and the peak table."""

import time

import pytest
import torch
from conftest import SMALL, command

from posttrain.config import Architecture, ModelConf
from posttrain.mfu import peak_tflops
from posttrain.models import gdn_packing
from posttrain.models.loading import load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HYBRIDS = [Architecture.qwen3_5_dense, Architecture.qwen3_5_moe, Architecture.qwen3_next]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
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
    lengths = [1, 2, 13, 17, 64, 65]
    ids = torch.randint(0, 256, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model(input_ids=ids, **gdn_packing.boundaries(lengths, "cpu")).logits
        found = model.cuda()(input_ids=ids.cuda(), **gdn_packing.boundaries(lengths, "cuda")).logits.cpu()
    assert (found - wanted).abs().max() < 2e-2 * wanted.abs().max()


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
