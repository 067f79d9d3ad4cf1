"""Environments with triton and no GPU: the fused kernels in Triton's interpreter, and without it our way past them.

The interpreter is slow: the file takes 8 minutes on one core.
"""

import json
import os
import subprocess

import pytest
from conftest import ROOT, SMALL
from environment import environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
CHUNK_RULE = "flash-linear-attention 0.6.0 chunk_gated_delta_rule"
CONVOLUTION = "flash-linear-attention 0.6.0 causal_conv1d"
CHUNK_KDA = "flash-linear-attention 0.6.0 chunk_kda"


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The triton that the interpreter's lessons were written for, and flash-linear-attention, beside a CPU's torch."""
    return environment(tmp_path_factory.mktemp("triton"), "triton==3.9.0", "flash-linear-attention==0.6.0")


def check(python, name):
    """One check of triton_interpreter.py: a dict of errors relative to the largest value."""
    process = subprocess.run(
        [python, ROOT / "tests" / "triton_interpreter.py", name],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    print(process.stdout)
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("gated delta rule", CHUNK_RULE),
        ("gated delta rule, many of one token", CHUNK_RULE),
        ("kimi delta attention", CHUNK_KDA),
        ("convolution", CONVOLUTION),
        ("convolution with a bias", CONVOLUTION),
    ],
)
def test_fused_kernels_with_our_boundaries_equal_each_document_alone(python, name, kernel):
    found = check(python, name)
    assert found["kernels"] == [kernel]
    assert max(found["outputs"], found["reference_outputs"]) < 1e-5
    assert max(found["gradients"], found["reference_gradients"]) < 2e-5
    assert found["boundaries_dropped"] > 0.1


@pytest.mark.parametrize(("name", "kernel"), [("qwen3_5", CHUNK_RULE), ("kimi_linear", CHUNK_KDA)])
def test_a_model_on_fused_kernels_equals_its_documents_on_torch(python, name, kernel):
    found = check(python, name)
    assert {kernel, CONVOLUTION} <= set(found["kernels"])
    assert max(found["outputs"], found["after_a_packed_row"]) < 1e-5
    assert found["gradients"] < 2e-5


def test_the_probe_passes_on_fused_kernels(python):
    found = check(python, "qwen3_5 probe")
    assert {CHUNK_RULE, CONVOLUTION} <= set(found["kernels"])
    assert found["difference"] < 1e-5


def test_boundaries_that_do_not_reach_a_fused_kernel_are_noticed(python):
    found = check(python, "qwen3_5 without boundaries")
    assert found["boundaries_dropped"] > 0.1
    assert "Qwen3_5GatedDeltaNet" in found["refused"]


def test_triton_and_flash_linear_attention_importable_without_a_gpu(python, tmp_path):
    """There transformers binds Triton kernels at import, and its first forward dies; ours follows the tensors."""
    stock = (
        "import torch; from transformers import AutoModelForCausalLM as M;"
        "from posttrain.models.tiny import tiny_config;"
        "M.from_config(tiny_config('qwen3_5_dense'))(torch.ones(1, 9, dtype=torch.long))"
    )
    died = subprocess.run([python, "-c", stock], capture_output=True, text=True, timeout=600)
    assert died.returncode != 0 and "active driver" in died.stderr, died.stderr[-2000:]
    directory = tmp_path / "run"
    recipe = [python, ROOT / "recipes" / "grpo.py", *SMALL, f"hydra.run.dir={directory}"]
    ours = subprocess.run(recipe, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ours.returncode == 0, ours.stdout[-3000:] + ours.stderr[-3000:]
    assert "gated_delta_rule: reference (torch)" in ours.stdout
    assert json.loads((directory / "summary.json").read_text())["status"] == "completed"
