"""CONTRIBUTING.md followed to the letter: its code blocks are applied to a copy of the project, and the copy trains."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from transformers import LlamaConfig, LlamaForCausalLM

BLOCK = re.compile(r"^```(\w+) (\S+/\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTIONS = ("Add a model", "Add a task", "Add an algorithm", "Add an engine")


def blocks(section):
    """(kind, path, text) of each code block that names a file."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return BLOCK.findall(text.split(f"\n## {section}\n")[1].split("\n## ")[0])


def follow(kind, file, text):
    """A new file, or the hunks of a diff; each stands once in the file as it is."""
    if kind != "diff":
        assert not file.exists(), f"{file} exists already"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return
    for hunk in re.split(r"^\.\.\.\n", text, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        assert all(line[0] in " +-" for line in lines), hunk
        before, after = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
        content = file.read_text()
        assert content.count(before) == 1, f"{file} has {content.count(before)} times:\n{before}"
        file.write_text(content.replace(before, after))


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    project = tmp_path_factory.mktemp("newcomer")
    for folder in ("src", "recipes", "conf"):
        shutil.copytree(ROOT / folder, project / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for section in SECTIONS:
        assert (found := blocks(section)), section
        for kind, path, text in found:
            follow(kind, project / path, text)
    return project


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A tiny random model of the new architecture, with the embedded models' tokenizer."""
    directory = tmp_path_factory.mktemp("llama")
    for file in (ROOT / "src/posttrain/models/embedded/qwen3_dense").glob("token*"):
        shutil.copy(file, directory)
    embedded = json.loads((ROOT / "src/posttrain/models/embedded/qwen3_dense/config.json").read_text())
    widths = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {name: embedded[name] for name in ("vocab_size", "eos_token_id", "pad_token_id")}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**widths, **tokens)).save_pretrained(directory)
    return directory


def train(copy, run_dir, *overrides):
    return subprocess.run(
        [sys.executable, str(copy / "recipes/grpo.py"), *overrides, f"hydra.run.dir={run_dir}"],
        env=os.environ | {"PYTHONPATH": str(copy / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )


def test_the_new_model_task_algorithm_and_engine_train(copy, llama, tmp_path):
    """The engine's weights are the policy's in step 2 too, although the first update moved them: by an entropy bonus,
    as a random model is never right and has no other gradient."""
    new = ["model=llama", f"model.path={llama}", "task=parity", "algorithm=corrected", "rollout=copied"]
    small = ["steps=2", "prompts_per_step=2", "algorithm.entropy_coefficient=1", "optim.lr=1e-2", "checkpoint.every=0"]
    process = train(copy, tmp_path / "run", *new, *small, "evaluation.prompts=2", "checkpoint.export=false")
    assert process.returncode == 0, process.stdout
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "completed" and summary["task"] == {"train": 900, "heldout": 100, "dropped": {}}
    job = json.loads((tmp_path / "run/job.json").read_text())
    assert (job["model"]["architecture"], job["rollout"]["name"]) == ("llama", "copied")
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "reward" in record]
    assert len(steps) == 2 and all(step["grad_norm"] > 0 for step in steps)
    assert all(0 < step["sampling/logp_difference/max"] < 1e-4 for step in steps)
    assert all(abs(step["correction/weight"] - 1) < 1e-4 for step in steps)
    assert all("rewards/correct/mean" in step for step in steps)


def test_other_weights_are_no_llama(copy, tmp_path):
    qwen = ROOT / "src/posttrain/models/embedded/qwen3_dense"
    process = train(copy, tmp_path / "run", "model=llama", f"model.path={qwen}")
    assert process.returncode == 2 and "model=llama takes llama. Type model=qwen3_dense" in process.stdout


def test_the_copy_is_clean(copy):
    """What the blocks add passes the project's lints."""
    files = {path for section in SECTIONS for _, path, _ in blocks(section) if path.endswith(".py")}
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "--config", str(ROOT / "pyproject.toml")]
        assert subprocess.run([*ruff, *(str(copy / file) for file in files)]).returncode == 0
