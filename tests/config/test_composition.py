"""Every file of conf/ composes into a typed job."""

import itertools
import json

import pytest
from composition import CONF, GROUPS, NEEDED, composer
from omegaconf import OmegaConf

from posttrain.config import RECIPES, GRPOConf
from posttrain.config.algorithm import AlgorithmConf
from posttrain.config.validation import typed


@pytest.fixture
def compose(tmp_path, monkeypatch, capsys):
    return composer(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_option_of_every_group(compose, recipe):
    """Column by column, to compose a few times only; experiments and sweeps have their own tests."""
    defaults = [entry for entry in OmegaConf.load(CONF / f"{recipe}.yaml").defaults if not isinstance(entry, str)]
    groups = sorted({group for entry in defaults for group in entry} & set(GROUPS) - {"experiment", "sweep"})
    choices = [[f"{group}={file.stem}" for file in sorted((CONF / group).glob("*.yaml"))] for group in groups]
    for column in itertools.zip_longest(*choices):
        arguments = [choice for choice in column if choice]
        needed = [value for choice in arguments for value in NEEDED.get(choice, [])]
        status, jobs, err = compose(*arguments, *needed, recipe=recipe, world=4)
        assert (status, [type(job) for job in jobs]) == (0, [RECIPES[recipe]]), arguments
        assert all(line.startswith("note: ") for line in err.splitlines()), err


@pytest.mark.parametrize("name", [file.stem for file in (CONF / "experiment").glob("*.yaml")])
def test_every_experiment(compose, name):
    status, jobs, err = compose(f"experiment={name}", world=8)
    assert (status, len(jobs), err) == (0, 1, "")


@pytest.mark.parametrize("name", [file.stem for file in (CONF / "sweep").glob("*.yaml")])
def test_every_sweep(compose, name):
    status, jobs, err = compose("-m", f"sweep={name}", world=4)
    params = OmegaConf.load(CONF / "sweep" / f"{name}.yaml").hydra.sweeper.params
    expected = 1
    for values in params.values():
        expected *= len(str(values).split(","))
    assert (status, len(jobs)) == (0, expected)
    assert all(line.startswith("note: ") for line in err.splitlines()), err


def test_defaults_and_what_follows_from_others(compose):
    _, (job,), _ = compose()
    assert isinstance(job, GRPOConf)
    assert job.model.path is None and job.optim.lr > 1e-4  # of the embedded model
    assert job.rollout.max_new_tokens == job.task.max_new_tokens < 20
    assert (job.fsdp.strategy, job.packing.mode, job.metrics.name) == ("full_shard", "thd", "mfu")
    assert (job.task.name, job.logger.name, job.launch.nproc) == ("arithmetic", "none", "auto")
    _, (real,), _ = compose("model.path=Qwen/Qwen3.5-4B", "task=gsm8k", "launch.nproc=3")
    assert (real.optim.lr, real.rollout.max_new_tokens, real.launch.nproc) == (1e-6, 1024, 3)
    assert (real.task.prompt_column, real.task.answer_reward) == ("question", "numeric")
    _, (tuned,), _ = compose("model.path=Qwen/Qwen3.5-4B", "optim.lr=3e-6", recipe="sft")
    assert tuned.optim.lr == 3e-6


def test_an_algorithm_is_grpo_and_what_it_changes(compose):
    _, jobs, _ = compose("-m", "algorithm=grpo,dr_grpo,dapo,gspo,cispo,sapo,rloo,reinforce_pp")
    found = [job.algorithm for job in jobs]
    assert len({repr(algorithm) for algorithm in found}) == 8 and found[0] == AlgorithmConf()
    assert found[3].clip_low == 3e-4 and found[4].clip_low is None and found[2].overlong.buffer == 0.2
    assert all(algorithm.kl.coefficient == 0 and algorithm.updates_per_rollout == 1 for algorithm in found)


def test_shard_size_is_for_hybrid_shard_only(compose):
    """So that a sweep over strategies can set it once."""
    status, jobs, _ = compose("-m", "fsdp=full_shard,hybrid_shard", "fsdp.shard_size=2", world=4)
    assert status == 0 and [job.fsdp.shard_size for job in jobs] == [2, 2]


def test_a_job_survives_json(compose):
    _, (job,), _ = compose("task=gsm8k", "launch.nproc=2")
    values = OmegaConf.to_container(OmegaConf.structured(job), enum_to_str=True)
    assert typed("grpo", json.loads(json.dumps(values))) == job
