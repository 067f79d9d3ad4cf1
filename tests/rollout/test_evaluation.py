"""The held-out evaluation, against transformers' generate and a count by hand."""

import dataclasses
import json
import statistics

import pytest
import torch
from jobs import run_jobs, values
from test_statistics import wilson_by_bisection

from posttrain.config.validation import typed
from posttrain.errors import UserError
from posttrain.rollout.evaluation import evaluate
from posttrain.tasks import make_task
from posttrain.training.policy import prepare

ASKED = 24


@pytest.fixture
def prepared(one_rank):
    """(configuration, policy, task); training would sample at a temperature of 1.5."""
    options = [f"evaluation.prompts={ASKED}", "packing.verify=false", "rollout.batch_size=7", "rollout.temperature=1.5"]
    cfg = typed("grpo", values("grpo", options))
    policy = prepare(cfg)
    return cfg, policy, make_task(cfg.task, policy.tokenizer)


def test_it_is_of_the_first_held_out_problems_and_greedy_whatever_training_does(prepared):
    cfg, policy, task = prepared
    shown = []

    def note(module, positional, named):
        if named["input_ids"].shape[1] > 1:  # a prefill; what is decoded comes one token at a time
            for ids, mask in zip(named["input_ids"].tolist(), named["attention_mask"].tolist(), strict=True):
                shown.append(tuple(token for token, real in zip(ids, mask, strict=True) if real))

    hook = policy.model.register_forward_pre_hook(note, with_kwargs=True)
    found = evaluate(policy, task, cfg)
    hook.remove()
    assert shown == [problem.prompt_ids for problem in task.heldout[:ASKED]]
    right = formed = cut = 0
    rewards, lengths = [], []
    for problem in task.heldout[:ASKED]:
        ids = policy.model.generate(
            torch.tensor([problem.prompt_ids]),
            max_new_tokens=cfg.rollout.max_new_tokens,
            do_sample=False,
            eos_token_id=list(policy.end_ids),
            pad_token_id=policy.pad_id,
        )[0, len(problem.prompt_ids) :]
        text, ended = policy.tokenizer.decode(ids, skip_special_tokens=True), ids[-1].item() in policy.end_ids
        right += ended and text == problem.answer
        formed += ended and text.isdigit()
        cut += not ended
        rewards.append(0.9 * (ended and text == problem.answer) + 0.1 * (ended and text.isdigit()))
        lengths.append(len(ids))
    assert 0 < right < ASKED  # or a count would say little
    middle, half = statistics.mean(rewards), 1.959964 * statistics.stdev(rewards) / ASKED**0.5
    low, high = middle - half, middle + half
    proportion = wilson_by_bisection(right, ASKED)
    assert found == pytest.approx(
        {
            "eval/reward": (0.9 * right + 0.1 * formed) / ASKED,
            "eval/rewards/correct": right / ASKED,
            "eval/rewards/format": formed / ASKED,
            "eval/reward/low": low,
            "eval/reward/high": high,
            "eval/pass@1": right / ASKED,
            "eval/pass@1/low": proportion[0],
            "eval/pass@1/high": proportion[1],
            "eval/mean_length": sum(lengths) / ASKED,
            "eval/truncated": cut / ASKED,
            "eval/prompts": ASKED,
        }
    )


def test_it_has_a_temperature_of_its_own(prepared):
    """Cold it repeats the greedy evaluation, and hot it is wrong nearly always, though training samples at 1.5."""
    cfg, policy, task = prepared

    def at(temperature):
        evaluation = dataclasses.replace(cfg.evaluation, temperature=temperature)
        return evaluate(policy, task, dataclasses.replace(cfg, evaluation=evaluation))

    greedy, cold, hot = at(0.0), at(1e-4), at(50.0)
    assert cold == greedy and hot["eval/rewards/correct"] == 0 < greedy["eval/rewards/correct"]


def test_several_samples_by_a_column_on_one_rank_and_two(tmp_path):
    """Counted by hand from the samples of a file whose levels are of different difficulty."""
    rows = [
        {"prompt": f"{a}+{b}=", "answer": a + b, "level": "low" if a < 5 else "high"} for a in range(10) for b in (1, 9)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Training is not what is tested: any other file will do.
    (tmp_path / "train.jsonl").write_text(json.dumps(rows[0]) + "\n")
    job = ["task=jsonl", f"task.path={tmp_path}/train.jsonl", f"task.eval_path={tmp_path}/rows.jsonl"]
    job += ["task.max_new_tokens=8", "evaluation.samples=3", "evaluation.temperature=2.5", "evaluation.by=level"]
    found = []
    for ranks in (1, 2):
        (run,) = run_jobs(tmp_path / str(ranks), job, nproc=ranks, recipe="evaluate")
        assert run.returncode == 0, run.output
        found.append({name: value for name, value in run.records[0].items() if "time/" not in name})
    one, two = found
    assert one == pytest.approx(two, abs=1e-9)
    assert one["eval/prompts"] == 20 and one["eval/level/low/prompts"] == one["eval/level/high/prompts"] == 10
    assert 0 < one["eval/pass@1"] < one["eval/pass@2"] < one["eval/pass@3"] < 1
    assert one["eval/pass@1"] == pytest.approx(one["eval/rewards/correct"])
    for name in ("pass@1", "pass@3", "maj@3", "reward"):
        halves = one[f"eval/level/low/{name}"], one[f"eval/level/high/{name}"]
        assert one[f"eval/{name}"] == pytest.approx(sum(halves) / 2) and halves[0] != halves[1]


def test_a_column_that_there_is_not(prepared):
    cfg, policy, task = prepared
    with pytest.raises(UserError, match="evaluation.by=level: the rows have no such column; they have task"):
        evaluate(policy, task, dataclasses.replace(cfg, evaluation=dataclasses.replace(cfg.evaluation, by="level")))
    by_task = evaluate(
        policy, task, dataclasses.replace(cfg, evaluation=dataclasses.replace(cfg.evaluation, by="task"))
    )
    assert by_task["eval/task/arithmetic/reward"] == by_task["eval/reward"]
