"""Prompts and documents beyond what the model has positions for: said at start, refused in a step."""

import json
import math
import shutil
import statistics

import pytest
import torch
from conftest import typed
from jobs import run_jobs
from packing_cases import conf

from posttrain.config import Architecture, GRPOConf, ModelConf, RolloutConf
from posttrain.config.rules import problems
from posttrain.config.task import ArithmeticConf, TaskName
from posttrain.errors import UserError
from posttrain.models import gdn_packing
from posttrain.models.loading import end_token_ids, load
from posttrain.models.tiny import EMBEDDED
from posttrain.packing import planning
from posttrain.records import Problem
from posttrain.rollout.local import generate
from posttrain.tasks import batch, make_task


def problem(prompt_ids: tuple[int, ...], index: int) -> Problem:
    return Problem(task="arithmetic", index=index, prompt="", prompt_ids=prompt_ids, answer="")


@pytest.mark.parametrize("budget, multiple, instead", [(64, 65, 65), (100, 64, 64)])
def test_padding_past_the_budget_is_refused(budget, multiple, instead):
    (message,) = [m for m in problems(GRPOConf(packing=conf("thd", budget, multiple)), 1) if "packing." in m]
    assert f"packing.pad_multiple={multiple}" in message and f"type packing.tokens_per_row={instead}" in message
    assert not [m for m in problems(GRPOConf(packing=conf("thd", 128, 64)), 1) if "packing." in m]


def test_prompts_and_new_tokens_beyond_the_positions():
    prompts = [problem((1,) * length, n) for n, length in enumerate((5, 9, 7))]
    assert planning.short_of_room(prompts, 11, 20) == []
    assert planning.short_of_room(prompts, 10**6, math.inf) == []
    (warning,) = planning.short_of_room(prompts, 12, 20)
    assert "1 of 3 prompts" in warning and "rollout.max_new_tokens=12" in warning
    with pytest.raises(UserError, match="type rollout.max_new_tokens=11 or less"):
        planning.short_of_room(prompts, 16, 20)
    with pytest.raises(UserError, match="type rollout.max_new_tokens=2 or less"):
        planning.short_of_room(prompts, 4, 7)
    with pytest.raises(UserError, match="take a model of more positions"):
        planning.short_of_room(prompts, 4, 5)


@pytest.fixture
def shallow(tmp_path):
    """The embedded model with only so many positions."""

    def make(positions: int) -> str:
        folder = tmp_path / f"{positions}"
        shutil.copytree(EMBEDDED / "qwen3_5_dense", folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": positions}))
        return str(folder)

    return make


def test_documents_beyond_the_positions_do_not_count_in_supervised_steps(shallow, tmp_path):
    """The loss is the mean over the tokens of the others, each document alone in a plain model call."""
    rows = [("1+2=", "3"), ("40+2=", "42"), ("7+8=", "15" * 20), ("9+9=", "18"), ("30+30=", "6" * 30)]
    for name, shown in (("train", rows), ("heldout", rows[:1])):
        lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in shown]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    path = shallow(16)
    files = ["task=jsonl", f"task.path={tmp_path}/train.jsonl", f"task.eval_path={tmp_path}/heldout.jsonl"]
    options = [f"model.path={path}", *files, "steps=1", "batch_size=5", "evaluation.prompts=0"]
    (run,) = run_jobs(tmp_path / "jobs", options, recipe="sft")
    assert run.returncode == 0, run.output
    (record,) = run.training

    model, tokenizer = load(ModelConf(architecture=Architecture.qwen3_5_dense))
    losses, tokens = [], 0
    for prompt, answer in (rows[0], rows[1], rows[3]):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        start = len(tokenizer(text)["input_ids"])
        ids = torch.tensor([[*tokenizer(text + answer)["input_ids"], tokenizer.eos_token_id]])
        table = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        losses += [-table[k - 1, ids[0, k]].item() for k in range(start, ids.shape[1])]
        tokens += ids.shape[1]
    assert record["packing/refused"] == 2 and record["num_tokens"] == tokens
    assert record["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def test_samples_beyond_the_positions_are_refused(grpo, shallow):
    """At the policy that sampled every ratio is 1: the loss is the mean of -advantage over the others' tokens."""
    limit, path = 12, shallow(12)
    run = grpo(
        f"model.path={path}",
        "task.max_new_tokens=4",
        "evaluation.prompts=0",
        "packing.tokens_per_row=20",
        "prompts_per_step=8",
    )
    assert run.returncode == 0, run.output
    assert "prompts, whose longest samples will be refused" in run.output and run.summary["packing"]["warnings"]

    model, tokenizer = load(ModelConf(architecture=Architecture.auto, path=path))
    gdn_packing.patch(model)
    task = make_task(ArithmeticConf(name=TaskName.arithmetic), tokenizer)
    asked = dict(enumerate(batch(task.train, 8, step=0, seed=0)))
    rollouts = generate(
        model,
        list(asked.items()),
        RolloutConf(group_size=4, max_new_tokens=4),
        key=(0, 0, 0),
        end_ids=end_token_ids(model, tokenizer),
        pad_id=tokenizer.pad_token_id,
    )
    rewards = [each.scores["total"] for each in task.score([(asked[rollout.group], rollout) for rollout in rollouts])]
    kept = [len(rollout.ids) <= limit for rollout in rollouts]
    total = 0.0
    for n in range(len(rollouts)):
        if kept[n]:
            group = rewards[n // 4 * 4 : n // 4 * 4 + 4]  # a refused sample's reward still counts among its group's
            advantage = (rewards[n] - statistics.mean(group)) / (statistics.stdev(group) + 1e-4)
            total -= advantage  # the mean over its tokens, whose ratio is 1
    first = run.training[0]
    assert first["packing/refused"] == kept.count(False) > 0 < kept.count(True)
    assert first["loss"] == pytest.approx(total / kept.count(True), abs=1e-5) and abs(total) > 0.1


def test_a_model_without_room_for_any_sample_is_refused_at_start(tmp_path, shallow):
    run = typed(tmp_path / "run", f"model.path={shallow(10)}", "task.max_new_tokens=10")
    assert run.returncode == 2, run.output
    assert "rollout.max_new_tokens=10" in run.output and "Traceback" not in run.output
