"""Every command of README, CONTRIBUTING and docs/: run here, shortened, or marked as too much for this test.

A command may say in its comment, or the line above its block may say, that it needs a GPU, the hub, another package
index or minutes. It is then only checked: the options against the schema and the rules, files and targets against what
there is. The survey's commands are checked by its parser; tests/models/survey run them.
"""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import yaml
from conftest import ROOT, command
from hydra.core.override_parser.overrides_parser import OverridesParser
from jobs import run_jobs, values
from reading import DOCS, NEEDS, in_blocks, in_prose, metric_names, metric_pattern, parts

from posttrain.config.rules import problems
from posttrain.config.validation import typed
from posttrain.models.architectures import architectures
from posttrain.models.survey import __main__ as survey

BLOCKS = in_blocks()
ALL = list({tuple(each.words): each for each in [*in_prose(), *BLOCKS]}.values())
LESS = ["evaluation.prompts=2", "packing.verify=false"]
SHORT = {
    "grpo": ["steps=1", "prompts_per_step=4", "rollout.group_size=4", "launch.nproc=1", *LESS],
    "sft": ["steps=1", "batch_size=4", "checkpoint.every=0", "checkpoint.export=false", *LESS],
    "evaluate": ["evaluation.prompts=2"],
    "preflight": ["launch.nproc=1"],
}
EVERYTHING = [  # that adds a metric, and the model that evaluate takes
    "checkpoint.export=true",
    "rollout.max_staleness=1",
    "algorithm.kl.coefficient=1e-3",
    "algorithm.correction.level=token",
    "algorithm.off_policy_threshold=1",
]


def recipe_jobs(words, directory):
    """The recipe, and the overrides of each job that `python recipes/<recipe>.py ...` stands for.

    In place of the user's file and runs are those of `directory`.
    """
    rows = [json.dumps({"prompt": f"{n}+{n}=", "question": f"{n}+{n}=", "answer": str(2 * n)}) for n in range(8)]
    (directory / "mine.jsonl").write_text("\n".join(rows))
    for doc in DOCS:
        for info, text, _ in parts(doc):
            if re.fullmatch(r"python \w+\.py", info):  # a file that the reader is to write
                (directory / info.removeprefix("python ")).write_text(text)
    recipe = re.fullmatch(r"recipes/(\w+)\.py", words[1])[1]
    overrides, swept = [], {}
    for word in words[2:]:
        for users, here in (
            ("mine.jsonl", "mine.jsonl"),
            ("my_reward.py", "my_reward.py"),
            ("outputs/grpo/<run>", "grpo/0"),
        ):
            word = word.replace(users, str(directory / here))
        if word.startswith("sweep="):
            preset = yaml.safe_load((ROOT / f"conf/sweep/{word.partition('=')[2]}.yaml").read_text())
            swept |= preset["hydra"]["sweeper"]["params"]
        if word not in ("-m", "--json") and not word.startswith("hydra."):
            overrides.append(word)
    jobs = [[]]
    for override in [*overrides, *(f"{key}={each}" for key, each in swept.items())]:
        parsed = OverridesParser.create().parse_override(override)
        choices = parsed.sweep_string_iterator() if parsed.is_sweep_override() else None
        each = [override] if choices is None else [f"{parsed.get_key_element()}={choice}" for choice in choices]
        jobs = [[*job, choice] for job in jobs for choice in each]
    return recipe, jobs


def is_recipe(words):
    return words[0] == "python" and words[1].startswith("recipes/") and "--help" not in words


def is_survey(words):
    return words[:3] == ["python", "-m", "posttrain.models.survey"]


def runs(each):
    """Does a test run it? Those of tests/models/survey run the survey, on architectures by name."""
    by_name = is_survey(each.words) and len(each.words) > 4 and "--path" not in each.words
    return each.needs is None and (by_name or "".join(each.words[1:2]).startswith("recipes/"))


@pytest.mark.parametrize("each", BLOCKS, ids=str)
def test_a_command_is_run_or_says_what_it_needs(each):
    harmless = each.words[0] in ("make", "source")  # checked by what the Makefile has
    assert runs(each) or harmless or each.needs, f"{each}: run it in this test, or say what it needs: {NEEDS.pattern}"


@pytest.mark.parametrize("each", ALL, ids=str)
def test_a_command_names_what_there_is(each, tmp_path, monkeypatch):
    words, makefile = each.words, (ROOT / "Makefile").read_text()
    if words[0] == "make":
        # This test may itself be run by make, whose arguments are not this command's.
        own = {name: value for name, value in os.environ.items() if name not in ("ARGS", "MAKEFLAGS", "MFLAGS")}
        dry = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, env=own)
        assert dry.returncode == 0, dry.stderr
        for line in dry.stdout.splitlines():
            if re.match(r"\S*python recipes/", line) and "$" not in line:
                check_options(["python", *shlex.split(line)[1:]], tmp_path)
    elif words[0] == "source":
        venv = re.search(r"^VENV +\?= (.+)$", makefile, re.MULTILINE)[1]
        assert words[1] == f"{venv}/bin/activate"
    elif words[0] == "pip":
        assert all((ROOT / words[n + 1]).is_file() for n, word in enumerate(words) if word == "-r")
    elif is_recipe(words):
        check_options(words, tmp_path)
    elif is_survey(words):
        monkeypatch.setattr(sys, "argv", words[2:])
        named = [name for name in survey.arguments().architectures if "<" not in name]
        assert set(named) <= set(architectures())
    else:
        assert all((ROOT / word).exists() for word in words if re.search(r"\.(py|ipynb)$", word)), each


def check_options(words, tmp_path):
    recipe, jobs = recipe_jobs(words, tmp_path)
    for job in jobs:
        found = values(recipe, job)
        nproc = found["launch"]["nproc"]
        assert problems(typed(recipe, found), nproc if isinstance(nproc, int) else 1) == []


def shortened(recipe, directory):
    """The jobs of this recipe's commands that are run, each once; of a sweep its first."""
    found = {}
    for each in BLOCKS:
        if runs(each) and each.words[1:2] == [f"recipes/{recipe}.py"] and is_recipe(each.words):
            _, (first, *_) = recipe_jobs(each.words, directory)
            job = [*first, *SHORT[recipe]]
            found[json.dumps(values(recipe, job))] = job
    return list(found.values())


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What the commands of all recipes did; evaluate takes the model that the first job of grpo wrote."""
    directory, found = tmp_path_factory.mktemp("commands"), {}
    for recipe in ("grpo", "sft", "evaluate", "preflight"):
        first = [[*SHORT["grpo"], *EVERYTHING]] if recipe == "grpo" else []
        found[recipe] = run_jobs(directory / recipe, *first, *shortened(recipe, directory), recipe=recipe)
    return found


def test_the_commands_of_recipes_run(ran):
    for recipe, jobs in ran.items():
        assert jobs, recipe
        for job in jobs:
            assert job.returncode == 0, job.output
            assert job.summary["status"] == "completed"


def test_metrics_are_documented_and_documented_metrics_exist(ran):
    names = metric_names()
    trained = [job for recipe, jobs in ran.items() for job in jobs if recipe != "preflight"]
    logged = {name for job in trained for record in job.records for name in record} - {"step"}
    known = metric_pattern(names)
    assert {name for name in logged if not known.fullmatch(name)} == set()
    rare = {"skipped_updates", "packing/refused", "perf/mfu_unavailable"}
    missing = {name for name in names if not any(metric_pattern([name]).fullmatch(each) for each in logged)}
    assert missing <= rare


def test_help_is_what_it_says():
    assert ["python", "recipes/grpo.py", "--help"] in [each.words for each in BLOCKS]
    process = command("grpo", "--help")
    assert process.returncode == 0 and all(group in process.stdout for group in ("algorithm", "task", "seed"))


def test_the_python_of_the_docs_runs():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    (code,) = (text for info, text, _ in parts(ROOT / "docs/flops.md") if info == "python")
    widths = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    names = {"model": Qwen3ForCausalLM(Qwen3Config(**widths)), "lengths": (5, 3), "logits": 4}
    names |= {"prompt": 5, "completions": (3, 2)}
    exec(code, names)
    assert names["counter"].training((5, 3), 4) == 3 * names["counter"].forward((5, 3), 4)
