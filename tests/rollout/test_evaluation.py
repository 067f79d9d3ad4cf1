"""The held-out evaluation, against transformers' generate and a count by hand."""

import dataclasses

import pytest
import torch
from jobs import values

from posttrain.config.validation import typed
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
    right = formed = 0
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
    assert 0 < right < ASKED  # or a count would say little
    assert found == pytest.approx(
        {
            "eval/reward": (0.9 * right + 0.1 * formed) / ASKED,
            "eval/rewards/correct": right / ASKED,
            "eval/rewards/format": formed / ASKED,
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
