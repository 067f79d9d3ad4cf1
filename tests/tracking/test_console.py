"""The banner says what was resolved, not what was typed."""

import pytest

from posttrain.tracking.console import banner

FACTS = {
    "model": "some/where",
    "parameters": 4_000_000_000,
    "world_size": 2,
    "device": "cpu",
    "task": {"train": 10, "heldout": 5, "dropped": {}},
    "optim": {"lr": 1e-6, "schedule": "constant", "warmup_steps": 10},
    "every": {"evaluation": 0, "checkpoint": 100},
    "max_staleness": 0,
}


def rows(**facts) -> dict[str, str]:
    lines = banner(FACTS | facts).splitlines()
    return {name: text for name, text in (line.strip().split("  ", 1) for line in lines)}


@pytest.mark.parametrize(
    "optim, parameters, text",
    [
        (FACTS["optim"], 4_000_000_000, "AdamW, lr 1e-06, constant after 10 steps of warmup"),
        (
            {"lr": 6e-4, "schedule": "cosine", "warmup_steps": 1},
            500_000,
            "AdamW, lr 0.0006, cosine after 1 step of warmup",
        ),
        ({"lr": 1e-3, "schedule": "linear", "warmup_steps": 0}, 9_999_999, "AdamW, lr 0.001, linear"),
        (
            {"lr": 1e-6, "schedule": "constant", "warmup_steps": 0},
            9_999_999,
            "AdamW, lr 1e-06 (low for 9,999,999 parameters; optim.lr= sets it), constant",
        ),
        ({"lr": 1e-6, "schedule": "constant", "warmup_steps": 0}, 10_000_000, "AdamW, lr 1e-06, constant"),
    ],
)
def test_optimizer(optim, parameters, text):
    assert rows(optim=optim, parameters=parameters)["optimizer"].strip() == text


def test_pauses_and_staleness():
    assert rows()["pauses"].strip() == "checkpoint every 100 steps" and "sampling" not in rows()
    found = rows(every={"evaluation": 50, "checkpoint": 1}, max_staleness=2)
    assert found["pauses"].strip() == "evaluation every 50 steps, checkpoint every step"
    assert found["sampling"].strip() == "at most 2 steps ahead of training"
    assert "pauses" not in rows(every={"evaluation": 0, "checkpoint": 0})


def test_what_was_dropped_and_what_the_template_does():
    """Nothing is said of a tokenizer without a chat template."""
    assert not {"dropped", "turn end", "system", "prompts"} & rows().keys()
    plain = {"header": "", "turn_ends": [], "system": "", "warnings": []}
    assert not {"turn end", "system", "prompts"} & rows(template=plain).keys()
    dropped = {"no answer": 1_200, "longer than task.max_prompt_tokens": 3}
    template = {"header": "<a>", "turn_ends": ["<end>"], "system": "a turn of its own", "warnings": ["one", "two"]}
    found = rows(task=FACTS["task"] | {"dropped": dropped}, template=template)
    assert found["task"].strip() == "10 train, 5 heldout"
    assert found["dropped"].strip() == "1,203 rows: 1,200 no answer, 3 longer than task.max_prompt_tokens"
    assert found["turn end"].strip() == "<end>, by the chat template"
    assert found["system"].strip() == "the system prompt is a turn of its own"
    assert found["prompts"].strip() == "warning: one; two"


def test_a_recipe_that_does_not_train_has_no_such_rows():
    lines = banner({key: FACTS[key] for key in ("model", "parameters", "world_size", "device", "task")})
    assert [line.split()[0] for line in lines.splitlines()] == ["model", "ranks", "task"]
