"""What goes wrong, and what a user then sees: a line or two, the right exit status, a summary, no orphans."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, SMALL, command

from posttrain.models.tiny import EMBEDDED, tiny_tokenizer


def run(tmp_path, *overrides, **environment):
    process = command("grpo", *SMALL, f"hydra.run.dir={tmp_path / 'run'}", *overrides, **environment)
    summary = tmp_path / "run" / "summary.json"
    return process, json.loads(summary.read_text()) if summary.exists() else None


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["task=jsonl", "task.path=nowhere.jsonl"], "task.path=nowhere.jsonl cannot be read"),
        # What loading and resuming refuse has tests of its own without ranks.
        pytest.param(
            [f"model.path={EMBEDDED}/qwen3_dense"],
            "holds a 'qwen3' model.*Type model=qwen3_dense instead",
            marks=pytest.mark.slow,
        ),
        pytest.param(["resume=nowhere"], "resume=nowhere: no checkpoint there", marks=pytest.mark.slow),
    ],
)
def test_a_mistake_that_a_rank_finds(tmp_path, overrides, message):
    import re

    process, summary = run(tmp_path, *overrides, HF_HUB_OFFLINE="1")
    assert process.returncode == 2, process.stdout
    lines = process.stdout.strip().splitlines()
    assert re.search(message, lines[-1]) and len(lines) <= 2 and "Traceback" not in process.stdout
    assert summary["status"] == "failed" and re.search(message, summary["error"])


@pytest.mark.slow
def test_an_evaluation_of_no_problem_is_refused(tmp_path):
    process = command("evaluate", "task.heldout=0", f"hydra.run.dir={tmp_path / 'run'}")
    assert process.returncode == 2
    assert process.stdout.strip().splitlines()[-1] == "task=arithmetic has no held-out problem to evaluate on"


def save_untrained(path, config, name):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(config).save_pretrained(path / name)
    tiny_tokenizer().save_pretrained(path / name)
    return str(path / name)


SHAPE = dict(
    vocab_size=264,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=64,
    pad_token_id=257,
    eos_token_id=256,
    bos_token_id=None,
)


def test_any_causal_language_model_by_path(tmp_path):
    from transformers import LlamaConfig

    path = save_untrained(tmp_path, LlamaConfig(**SHAPE), "llama")
    process, summary = run(tmp_path, "model=auto", f"model.path={path}")
    assert process.returncode == 0, process.stdout
    assert summary["packing"]["verified"] and summary["packing"]["layers"] == {"LlamaAttention": 2}
    assert summary["mfu"]["available"]


def test_a_model_that_would_leak_is_refused(tmp_path):
    """Doge keeps the best keys of a row, padding among them."""
    from transformers import DogeConfig

    path = save_untrained(tmp_path, DogeConfig(**SHAPE, keep_window_size=64), "doge")
    process, summary = run(tmp_path / "thd", "model=auto", f"model.path={path}")
    assert process.returncode == 2 and "DogeAttention leaks" in process.stdout and "packing=padded" in process.stdout


def test_a_model_that_cannot_be_sized_runs_without_mfu(tmp_path, grpo):
    """The run goes on, and the absence is in every place."""
    from transformers import DiffLlamaConfig

    path = save_untrained(tmp_path, DiffLlamaConfig(**SHAPE), "diffllama")
    run = grpo("model=auto", f"model.path={path}", "packing=padded")
    assert run.returncode == 0, run.output
    assert run.summary["status"] == "completed" and not run.summary["mfu"]["available"]
    reason = run.summary["mfu"]["reason"]
    assert "DiffLlamaAttention" in reason and reason in run.output
    for record in run.training:
        assert record["perf/mfu_unavailable"] == 1 and "perf/mfu" not in record


def test_the_meter_changes_nothing(grpo):
    """A given peak, no meter, a measured peak: bitwise the same training."""
    runs = [grpo("metrics.peak_tflops=1000"), grpo("metrics=none"), grpo()]
    kept = [
        [{k: v for k, v in record.items() if not k.startswith(("time/", "perf/"))} for record in run.training]
        for run in runs
    ]
    assert kept[0] == kept[1] == kept[2] and len(kept[0]) == 2
    assert runs[0].summary["mfu"]["peak_source"] == "metrics.peak_tflops"


@pytest.mark.slow  # tests/tracking has the same without a model
def test_wandb_offline(tmp_path):
    process, summary = run(
        tmp_path, "logger=wandb", "logger.mode=offline", "logger.project=mine", "logger.run_name=first"
    )
    assert process.returncode == 0, process.stdout
    assert summary["logger"]["available"], summary["logger"]
    (log,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert b"mine" in log.read_bytes() and b"first" in log.read_bytes()


@pytest.mark.slow  # tests/tracking has the same without a model
def test_wandb_without_a_key_or_a_server_stops_nothing(tmp_path):
    process, summary = run(
        tmp_path, "logger=wandb", WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY="", HOME=str(tmp_path)
    )
    assert process.returncode == 0, process.stdout
    assert summary["status"] == "completed" and not summary["logger"]["available"]
    assert "wandb is off" in process.stdout


@pytest.mark.parametrize(
    "phase, overrides",
    [
        ("rollout", ["rollout.temperature=20", "rollout.max_new_tokens=2000", "prompts_per_step=128"]),
        pytest.param("backward", ["algorithm.updates_per_rollout=200", "prompts_per_step=16"], marks=pytest.mark.slow),
    ],
)
def test_ctrl_c(tmp_path, phase, overrides):
    directory = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "recipes/grpo.py", *SMALL, "launch.nproc=2", f"hydra.run.dir={directory}", *overrides],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while "sharding" not in (directory / "summary.json").read_text() if (directory / "summary.json").exists() else True:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.1)
    time.sleep(3.0)  # the rollouts of the second take a moment and its updates much longer; the first is the reverse
    assert not (directory / "metrics.jsonl").read_text(), "the step must still be running"
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 130 and time.monotonic() - began < 8
    assert output.strip().splitlines()[-1].startswith("interrupted") and "Traceback" not in output
    assert json.loads((directory / "summary.json").read_text())["status"] == "interrupted"
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk(tmp_path):
    small = tmp_path / "disk"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)]).returncode:
        pytest.skip("cannot mount")
    try:
        (small / "filler").write_bytes(b"x" * 60_000)
        process, _ = run(small, "steps=50", "launch.threads=1")
        assert process.returncode == 1 and "No space left" in process.stdout, process.stdout
        assert "Traceback" not in process.stdout and len(process.stdout.strip().splitlines()) < 60
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
