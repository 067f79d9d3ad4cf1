"""Each value has one home: its dataclass. A file of conf/ states only what its option changes."""

import re
from typing import get_type_hints

import pytest
from composition import CONF
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from posttrain.command import cli
from posttrain.config import RECIPES, GRPOConf, OptimConf
from posttrain.config.meanings import rows
from posttrain.config.task import MISSING, TASKS
from posttrain.config.validation import every_key

COMPLETE = ("experiment", "sweep")  # settings that are to be read alone
OPTIONS = [file for file in sorted(CONF.glob("*/*.yaml")) if file.parent.name not in COMPLETE]


def leaves(tree: dict, prefix: str = "") -> dict:
    found = {}
    for key, value in tree.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return found


def stated(file) -> dict:
    """The values of a file, interpolations as they are written."""
    values = OmegaConf.to_container(OmegaConf.load(file)) if file.read_text() else {}
    return leaves({key: value for key, value in (values or {}).items() if key not in ("defaults", "hydra")})


def schema(group: str, option: str) -> dict:
    conf = TASKS[option] if group == "task" else get_type_hints(GRPOConf)[group]
    return leaves(OmegaConf.to_container(OmegaConf.structured(conf), enum_to_str=True))


@pytest.mark.parametrize("file", OPTIONS, ids=lambda file: f"{file.parent.name}={file.stem}")
def test_an_option_states_what_it_changes(file):
    defaults = schema(file.parent.name, file.stem)
    same = {key for key, value in stated(file).items() if value == defaults[key] != MISSING}
    assert not same, "values that the schema has already"
    explicit = [key for key, value in stated(file).items() if re.search("when_embedded:[^,]+,[^,]+,", str(value))]
    assert not explicit, "the schema has the value for real weights"


@pytest.mark.parametrize("file", OPTIONS, ids=lambda file: f"{file.parent.name}={file.stem}")
def test_what_the_schema_leaves_open_is_set_by_each_option(file):
    assert {key for key, value in schema(file.parent.name, file.stem).items() if value == MISSING} <= set(stated(file))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_states_what_it_changes(recipe):
    """Each value of conf/<recipe>.yaml differs from the schema, or from what an option of the group says."""
    defaults = leaves(OmegaConf.to_container(OmegaConf.structured(RECIPES[recipe]), enum_to_str=True))
    for key, value in stated(CONF / f"{recipe}.yaml").items():
        group, _, rest = key.partition(".")
        said = [stated(file)[rest] for file in (CONF / group).glob("*.yaml") if rest in stated(file)]
        assert any(value != other for other in [defaults[key], *said]), f"{key}={value} says nothing new"


@pytest.mark.parametrize("recipe", RECIPES)
def test_derived_values_are_interpolations(recipe):
    known = leaves(OmegaConf.to_container(OmegaConf.structured(RECIPES[recipe])))
    values = stated(CONF / "derived.yaml")
    assert values and set(values) <= set(known) and all("${" in str(value) for value in values.values())


def test_real_weights_get_the_defaults_of_the_schema():
    """when_embedded with one value falls back to the dataclass, so that Python code and users have the same values."""
    cli._declare("grpo")
    cli._declare("sft")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        real = OmegaConf.to_object(compose("grpo", ["model.path=some/where"]))
        tiny = OmegaConf.to_object(compose("grpo", []))
        sft = OmegaConf.to_object(compose("sft", ["model.path=some/where"]))
    assert real.optim == OptimConf() and real.launch.threads == "auto" and real.packing.tokens_per_row == 4096
    assert (tiny.optim.lr, tiny.optim.warmup_steps) == (6e-4, 30)
    assert (tiny.launch.threads, tiny.packing.tokens_per_row) == (1, 1024)
    assert (sft.optim.lr, sft.optim.betas, sft.optim.warmup_steps) == (1e-5, [0.9, 0.999], 0)


@pytest.mark.parametrize("conf", [*RECIPES.values(), *TASKS.values()])
def test_every_value_has_a_meaning(conf):
    """`--help` reads it from the end of the field's line, where a formatter may break it."""
    assert [key for key, _, meaning in rows(conf) if len(meaning.split()) < 2] == []


def test_rows_are_what_is_typed():
    found = {key: (default, meaning) for key, default, meaning in rows(GRPOConf)}
    assert set(found) == {key for key in leaves(every_key("grpo")) if key in found or not key.startswith("task.")}
    assert found["optim.lr"] == ("1e-06", "the learning rate, after warmup")
    assert found["optim.betas"][0] == "[0.9,0.99]" and found["model.path"][0] == "null"
    assert found["packing.mode"] == ("", "how documents fill a micro-batch (thd, padded)")
    assert found["rollout.max_new_tokens"][1].startswith("the longest completion")  # of the parent class
    assert found["steps"][0] == "350" and "rollouts" in found["steps"][1]  # of the class that defines it last
