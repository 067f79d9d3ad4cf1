"""recipes/sft.py: against the mean over answer tokens written out, over ranks, resumed, and what it records."""

import json
import re

import pytest
import torch
from conftest import command
from jobs import run_jobs, values
from transformers import Phi3Config, Phi3ForCausalLM

from posttrain.config import Architecture, ModelConf
from posttrain.config.rules import problems
from posttrain.config.task import ArithmeticConf, TaskName
from posttrain.config.validation import typed
from posttrain.models import gdn_packing
from posttrain.models.loading import load
from posttrain.models.tiny import tiny_tokenizer
from posttrain.tasks import batch, make_task

STEPS, BATCH = 4, 6
RUN = [
    f"steps={STEPS}",
    f"batch_size={BATCH}",
    "optim.lr=1e-4",
    "packing.tokens_per_row=24",
    "evaluation.prompts=4",
    "checkpoint.every=0",
    "checkpoint.export=false",
    "metrics.peak_tflops=1",
]
RESUMABLE = ["checkpoint.every=2", "optim.schedule=linear", "optim.warmup_steps=3"]


def timeless(run):
    """The training records without what a clock or the memory says."""
    return [{k: v for k, v in record.items() if not k.startswith(("time/", "perf/"))} for record in run.training]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """name -> run, on one start of a rank."""
    jobs = {
        "plain": RUN,
        "unmetered": [*RUN, "metrics=none", "evaluation.every=2"],
        "saved": [*RUN, *RESUMABLE],
    }
    runs = run_jobs(tmp_path_factory.mktemp("one") / "jobs", *jobs.values(), recipe="sft", fault="watched_policy")
    return dict(zip(jobs, runs, strict=True))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    (run,) = run_jobs(tmp_path_factory.mktemp("two") / "jobs", RUN, nproc=2, recipe="sft", fault="watched_policy")
    assert run.returncode == 0 and run.summary["world_size"] == 2, run.output
    return run


@pytest.fixture(scope="module")
def written_out():
    """(loss, gradient norm) of each step: one document at a time, no packing, no sharding."""
    model, tokenizer = load(ModelConf(architecture=Architecture.qwen3_5_dense))
    gdn_packing.patch(model)
    train = make_task(ArithmeticConf(name=TaskName.arithmetic, largest=49), tokenizer).train
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.999), weight_decay=0.0)
    rows = []
    for step in range(STEPS):
        losses = []
        for problem in batch(train, BATCH, step, seed=0):
            answer = [*tokenizer(problem.answer)["input_ids"], tokenizer.eos_token_id]
            ids, first = torch.tensor([[*problem.prompt_ids, *answer]]), len(problem.prompt_ids)
            table = model(input_ids=ids, use_cache=False).logits[0, first - 1 : -1].log_softmax(-1)
            losses += -table.gather(1, ids[0, first:, None])[:, 0]
        loss = torch.stack(losses).mean()
        loss.backward()
        rows.append((loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()))
        optimizer.step()
        optimizer.zero_grad()
    return rows, train


def test_loss_and_gradient_norm_of_each_step_on_one_and_two_ranks(one, two, written_out):
    """Adam hides a loss that is too large, and a loss that falls says nothing: the norm tells."""
    rows, _ = written_out
    for run in (one["plain"], two):
        assert run.returncode == 0, run.output
        for record, (loss, norm) in zip(run.training, rows, strict=True):
            assert record["loss"] == pytest.approx(loss, abs=1e-4)
            assert record["grad_norm"] == pytest.approx(norm, rel=1e-3)
        assert max(record["packing/micro_batches"] for record in run.training) > 1
    for a, b in zip(timeless(one["plain"]), timeless(two), strict=True):
        assert (a["loss"], a["num_tokens"], a["learning_rate"]) == pytest.approx(
            (b["loss"], b["num_tokens"], b["learning_rate"]), rel=1e-3
        )


def test_each_step_shows_the_next_problems(two, written_out):
    _, train = written_out
    said = [json.loads(line) for line in re.findall(r"prompts (\[\[.*\]\])", two.output)]
    expected = [[list(problem.prompt_ids) for problem in batch(train, BATCH, step, seed=0)] for step in range(STEPS)]
    assert [[ids for _, ids in prompts] for prompts in said] == expected * 2  # of both ranks, which know all


def test_a_resumed_run_equals_the_uninterrupted_one(one, tmp_path):
    saved = one["saved"]
    assert saved.returncode == 0, saved.output
    step = saved.directory / "checkpoints" / "step_00000002"
    (resumed,) = run_jobs(tmp_path / "jobs", [*RUN, *RESUMABLE, f"resume={step}"], recipe="sft")
    assert resumed.returncode == 0, resumed.output
    assert timeless(resumed) == timeless(saved)[2:] and len(timeless(resumed)) == 2
    assert resumed.summary["resumed_from"] == str(step) and saved.training[0]["learning_rate"] < 1e-4
    assert [r["step"] for r in saved.records if "time/checkpoint" in r] == [2, 4]


def test_evaluations_between_steps_and_the_meter(one):
    plain, unmetered = one["plain"], one["unmetered"]
    assert [r["step"] for r in plain.records if "eval/reward" in r] == [4]
    assert [r["step"] for r in unmetered.records if "eval/reward" in r] == [2, 4]
    assert unmetered.summary["evaluation"]["eval/prompts"] == 4
    for record in plain.training:
        seconds = record["time/update"]
        assert record["perf/mfu"] == pytest.approx(record["perf/flops_update"] / seconds / 1e12)
        assert 0 < record["perf/mfu_step"] <= record["perf/mfu"] and record["perf/tokens_per_second"] > 0
    assert plain.summary["mfu"]["available"] and plain.summary["mfu"]["peak_source"] == "metrics.peak_tflops"
    assert unmetered.summary["mfu"] == {"available": False, "reason": "metrics=none"}
    assert not any("mfu" in name or "flops" in name for record in unmetered.records for name in record)
    assert timeless(plain) == timeless(unmetered)  # bitwise


def test_fine_tuning_skips_too(tmp_path):
    overrides = ["steps=3", "batch_size=4", "evaluation.prompts=0"]
    (run,) = run_jobs(tmp_path / "jobs", overrides, fault="nan_in_the_second_step", recipe="sft")
    assert run.returncode == 0, run.output
    steps = [record for record in run.records if "num_tokens" in record]
    assert [record.get("skipped_updates", 0) for record in steps] == [0, 1, 0]
    assert ["loss" in record for record in steps] == [True, False, True] and run.summary["skipped_updates"] == 1


def test_a_score_to_stop_at_needs_evaluations_to_be_compared_with():
    for options, told in ((["stop_at=0.4"], True), (["stop_at=0.4", "evaluation.every=2"], False)):
        (message,) = problems(typed("sft", values("sft", options)), 1) or [""]
        assert ("type evaluation.every=10 as well" in message) is told


def test_a_score_that_is_not_reached_stops_nothing(tmp_path):
    options = ["init=true", "steps=2", "batch_size=4", "evaluation.prompts=4", "evaluation.every=1", "stop_at=0.99"]
    (run,) = run_jobs(tmp_path / "jobs", [*options, "checkpoint.every=0", "checkpoint.export=false"], recipe="sft")
    assert run.returncode == 0 and run.summary["steps"] == 2, run.output


def test_supervised_steps_lower_the_loss_and_stop_early(tmp_path):
    directory = tmp_path / "run"
    options = ["init=true", "steps=6", "batch_size=32", "evaluation.prompts=8", "evaluation.every=3", "stop_at=0"]
    options.append("checkpoint.every=3")
    process = command("sft", *options, "launch.nproc=2", f"hydra.run.dir={directory}")
    assert process.returncode == 0, process.stdout
    summary = json.loads((directory / "summary.json").read_text())
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    losses = [record["loss"] for record in map(json.loads, lines) if "loss" in record]
    assert (
        len(losses) == 3
        and losses[0] > losses[1] > losses[2]
        and summary["steps"] == 3
        and summary["packing"]["verified"]
    )
    assert (directory / "model" / "model.safetensors").exists()
    # The checkpoint of the step at which it stopped: a run that resumes there has nothing to do again.
    assert (directory / "checkpoints" / "step_00000003").exists()


@pytest.mark.parametrize(
    "row, mode, said", [(512, "thd", ""), (1024, "thd", "rows of up to 512 tokens"), (1024, "padded", "")]
)
def test_a_model_that_changes_at_a_length_is_refused_where_the_data_reach_it(tmp_path, row, mode, said):
    """LongRoPE beyond 512 tokens: a packed row of more is not right, and documents of a dozen tokens alone are."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 512}
    factors = {"short_factor": [1.0] * 8, "long_factor": [8.0 + n for n in range(8)]}
    config = Phi3Config(
        vocab_size=264, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=None, bos_token_id=None, eos_token_id=None, max_position_embeddings=4096,
        original_max_position_embeddings=512, rope_parameters=rope | factors,
    )  # fmt: skip
    Phi3ForCausalLM(config).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    given = [f"model.path={tmp_path / 'model'}", f"packing.tokens_per_row={row}", f"packing={mode}"]
    more = ["model=auto", "steps=1", "batch_size=4", "evaluation.prompts=0", "checkpoint.every=0"]
    (run,) = run_jobs(tmp_path / "jobs", [*given, *more], recipe="sft")
    assert (run.returncode == 0) == (not said) and said in run.output, run.output
