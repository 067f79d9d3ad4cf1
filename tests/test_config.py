"""Every file of conf/ composes into a typed job, and every kind of mistake is refused in our words."""

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from posttrain.command import cli
from posttrain.config import RECIPES, FSDPConf, GRPOConf, JobConf, Strategy, hybrid_shard_size
from posttrain.config.rules import problems
from posttrain.config.validation import typed
from posttrain.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir())
NEEDED = {"model=auto": ["model.path=somewhere"], "task=jsonl": ["task.path=train.jsonl"]}


@pytest.fixture
def compose(tmp_path, monkeypatch, capsys):
    """compose(*arguments) -> exit status, jobs, stderr: the command line without the ranks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # restored afterwards; the command line sets it
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def run(*arguments: str, recipe: str = "grpo", world: int = 1) -> tuple[int, list[JobConf], str]:
        monkeypatch.setattr(sys, "argv", [f"{recipe}.py", *arguments])
        jobs: list[JobConf] = []

        def take(cfg) -> int:
            jobs.append(cli._checked(recipe, cfg, world)[0])
            return 0

        status = cli._read_command_line(ROOT / "recipes" / f"{recipe}.py", take)
        return status, jobs, capsys.readouterr().err

    return run


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


def test_relative_paths_are_seen_from_where_they_were_typed(compose, tmp_path):
    (tmp_path / "data.jsonl").touch()
    _, (job,), _ = compose("task=jsonl", "task.path=data.jsonl", "model.path=Qwen/Qwen3.5-4B")
    assert job.task.path == str(tmp_path / "data.jsonl")
    assert job.model.path == "Qwen/Qwen3.5-4B"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["optim.lrr=1"], ["optim.lrr: no such key; did you mean optim.lr?", "betas"]),
        (["lr=1"], ["did you mean optim.lr?"]),
        (["packng=thd"], ["packng: no such key; did you mean packing?"]),
        (["packing=thdd"], ["packing=thdd: no option; did you mean thd?", "padded, thd"]),
        (["experiment=nothing"], ["smoke"]),
        (["+optim.lrr=1"], ["optim.lrr: no such key; did you mean optim.lr?"]),
        (["+surprise=1", "+optim.lrr=1"], ["surprise: no such key", "optim.lrr: no such key"]),
        (["~steps"], ["steps: deleted"]),
        (["task=gsm8k", "task.largest=3"], ["task.largest: no such key", "prompt_column"]),
        (["task.name=gsm8k"], ["type task=gsm8k"]),
        (["optim.lr=fast"], ["optim.lr=fast: Value 'fast' of type 'str' could not be converted to Float"]),
        (["steps=null"], ["steps=null"]),
        (["optim.lr=${nothing}"], ["optim.lr", "'nothing' not found"]),
        (["fsdp.strategy=zero"], ["full_shard, shard_grad_op, hybrid_shard, no_shard"]),
        (["launch.nproc=two"], ["launch.nproc=two: must be auto"]),
        (["task=jsonl"], ["task.path needs a value: type task.path="]),
        (["model=auto"], ["model.path"]),
        (["model.path=a=b"], ["model.path=a=b", "quotes"]),
        (["steps"], ["key=value"]),
        (["loss.beta=0.1"], ["loss.beta: no such key; here it is algorithm.kl.coefficient"]),
        (["loss.epsilon=0.1"], ["here it is algorithm.clip_low and algorithm.clip_high"]),
        (["num_generations=8"], ["here it is rollout.group_size"]),
        (["algorithm.kl=0.1"], ["algorithm.kl is a group: type algorithm.kl.coefficient=..."]),
        (["hydra.run.folder=x"], ["hydra.run.folder"]),
        (["--run", "--multirun"], ["Only one of"]),
    ],
)
def test_mistakes(compose, tmp_path, arguments, words):
    status, jobs, err = compose(*arguments)
    assert (status, jobs) == (2, [])
    assert all(word in err for word in words), err
    assert "Traceback" not in err and "+optim" not in err.replace("+optim.lrr=1", "", 1)
    assert len(err.splitlines()) <= 2
    assert not list(tmp_path.glob("outputs/grpo/*")), "a refused job leaves a directory"


def test_mistakes_in_a_file_name_it(compose, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\noptim:\n  lrr: 1\n")
    status, _, err = compose("--config-dir", str(tmp_path), "experiment=mine")
    assert status == 2 and "mine" in err and "lrr" in err, err
    (tmp_path / "experiment" / "mine.yaml").write_text("optim: [unclosed\n")
    status, _, err = compose("--config-dir", str(tmp_path), "experiment=mine")
    assert status == 2 and "Traceback" not in err, err


WRONG = {
    "seed=-1": "seed=-1",
    "steps=0": "steps=0: must be 1 or more",
    "prompts_per_step=0": "prompts_per_step=0",
    "rollout.group_size=1": "GRPO compares",
    "rollout.temperature=0": "rollout.temperature=0.0: must be above 0",
    "rollout.top_p=1.5": "rollout.top_p",
    "algorithm.clip_low=1": "algorithm.clip_low=1.0",
    "algorithm.clip_high=0": "algorithm.clip_high",
    "algorithm.updates_per_rollout=0": "algorithm.updates_per_rollout",
    "algorithm.mini_batches=0": "algorithm.mini_batches=0: must be 1 or more",
    "algorithm.dual_clip=0.5": "algorithm.dual_clip=0.5: must be above",
    "algorithm.dynamic_sampling=-1": "algorithm.dynamic_sampling",
    "algorithm.kl.coefficient=-0.1": "algorithm.kl.coefficient",
    "algorithm.kl.refresh_mix=0": "algorithm.kl.refresh_mix",
    "algorithm.entropy_coefficient=-1": "algorithm.entropy_coefficient",
    "algorithm.correction.cap=0.5": "algorithm.correction.cap=0.5",
    "algorithm.off_policy_threshold=0": "algorithm.off_policy_threshold=0.0: must be above 0, or null",
    "algorithm.overlong.buffer=2": "algorithm.overlong.buffer=2.0: a part",
    "algorithm.overlong.factor=0": "algorithm.overlong.factor=0.0",
    "optim.max_skipped=0": "optim.max_skipped=0: must be 1 or more",
    "optim.lr=0": "optim.lr=0.0",
    "optim.betas=[0.9]": "optim.betas",
    "packing.tokens_per_row=0": "packing.tokens_per_row",
    "metrics.peak_tflops=0": "metrics.peak_tflops",
    "task.reward_correct=-1": "weights must be 0 or more",
    "launch.nproc=0": "launch.nproc=0",
    "launch.timeout_s=0": "launch.timeout_s",
    "checkpoint.every=-1": "checkpoint.every",
    "evaluation.prompts=-1": "evaluation.prompts",
    "evaluation.every=-1": "evaluation.every=-1: must be 0 or more",
    "task.heldout=-5": "task.heldout=-5: must be 0 or more",
    "task.largest=0": "task.largest=0: must be 1 or more",
    "fsdp=hybrid_shard": "fsdp=hybrid_shard needs",
}


def test_all_errors_at_once(compose):
    status, _, err = compose(*WRONG)
    assert status == 2
    assert len(err.splitlines()) == len(WRONG)
    assert all(any(message in line for line in err.splitlines()) for message in WRONG.values()), err


@pytest.mark.parametrize(
    "arguments, advice",
    [
        ("algorithm=sapo algorithm.clip_high=0.2", "type algorithm.clip_low=null algorithm.clip_high=null"),
        ("algorithm=sapo algorithm.sapo_tau_positive=null", "type algorithm=sapo"),
        ("algorithm.sapo_tau_positive=1", "only for algorithm=sapo"),
        ("algorithm.clip_high=null", "type algorithm.clip_low=0.2 algorithm.clip_high=0.2"),
        ("algorithm=cispo algorithm.clip_high=null", "type algorithm.clip_high=4"),
        ("algorithm=cispo algorithm.dual_clip=3", "type algorithm.dual_clip=null"),
        ("algorithm=gspo algorithm.dual_clip=1", "above 1 + algorithm.clip_high"),
        ("algorithm.advantage_baseline=batch", "type algorithm.advantage_scale=batch_tokens"),
        ("algorithm.advantage_baseline=batch algorithm.advantage_scale=none algorithm.dynamic_sampling=2", "algorithm.dynamic_sampling=0"),
        ("algorithm.kl.coefficient=0.1 algorithm.kl.estimator=k1", "type algorithm.kl.unbiased=true"),
        ("algorithm.kl.coefficient=0.1 algorithm.kl.estimator=k2 algorithm.kl.unbiased=true", "algorithm.kl.estimator=k3"),
        ("algorithm.kl.coefficient=0.1 algorithm.kl.refresh_every=1", "type more, or algorithm.kl.refresh_mix=0.5"),
        ("algorithm=reinforce_pp algorithm.dynamic_sampling=2", "algorithm.dynamic_sampling=0"),
        ("algorithm.correction.floor=1 algorithm.correction.cap=1", "and differ"),
        ("algorithm.correction.mode=mask algorithm.correction.cap=1", "masks by rounding"),
        ("algorithm.overlong.buffer=0.5 algorithm.overlong.factor=inf", "algorithm.overlong.factor=inf: must be a finite number"),
        ("optim.lr=nan", "optim.lr=nan: must be a finite number"),
        (
            "rollout.group_size=1 prompts_per_step=1 algorithm.advantage_baseline=batch algorithm.advantage_scale=batch",
            "nothing to be compared with",
        ),
        ("algorithm.correction.level=token rollout.top_p=0.9", "type rollout.top_p=1"),
        ("algorithm.off_policy_threshold=0.1 rollout.top_p=0.9", "algorithm.off_policy_threshold=null"),
        ("algorithm.mini_batches=3 prompts_per_step=2", "each needs a prompt"),
        ("rollout.group_size=1", "type algorithm.advantage_baseline=batch"),
    ],
)
def test_combinations_of_the_loss_that_make_no_sense(compose, arguments, advice):
    status, jobs, err = compose(*arguments.split())
    assert (status, jobs) == (2, []) and advice in err and len(err.splitlines()) == 1, err


@pytest.mark.parametrize(
    "arguments",
    [
        "algorithm.kl.coefficient=0.1 algorithm.kl.estimator=k1 algorithm.kl.unbiased=true",
        "rollout.group_size=1 algorithm.advantage_baseline=batch algorithm.advantage_scale=batch_tokens",
        "algorithm=cispo algorithm.clip_low=0.2 algorithm.clip_high=0.28",
        "algorithm=dapo algorithm.mask_truncated=true algorithm.correction.level=sequence_mean algorithm.correction.mode=mask",
    ],
)
def test_combinations_of_the_loss_that_do(compose, arguments):
    status, jobs, err = compose(*arguments.split())
    assert (status, len(jobs), err) == (0, 1, "")


@pytest.mark.parametrize(
    "arguments, note",
    [
        ("algorithm.kl.estimator=k2 algorithm.kl.refresh_every=5", "algorithm.kl.estimator=k2 algorithm.kl.refresh_every=5 without effect"),
        ("algorithm.correction.cap=5", "algorithm.correction.cap=5.0 without effect: algorithm.correction.level=none"),
        ("algorithm.overlong.factor=3", "algorithm.overlong.factor=3.0 without effect: algorithm.overlong.buffer=0.0"),
        ("algorithm=gspo algorithm.dual_clip=3", "algorithm.ratio=sequence_mean algorithm.dual_clip=3.0 without effect on gradients"),
        ("algorithm.kl.coefficient=0.1 algorithm.kl.refresh_mix=0.5", "algorithm.kl.refresh_mix=0.5 without effect"),
        ("algorithm=gspo algorithm.mini_batches=2", ""),
        ("algorithm=rloo", ""),  # the ratio of a completion has the gradient of all its tokens on each
        ("optim.max_grad_norm=inf", ""),
        ("algorithm.kl.estimator=k2 algorithm.kl.coefficient=0.1", ""),
    ],
)
def test_what_has_no_effect_is_said(compose, arguments, note):
    status, jobs, err = compose(*arguments.split())
    assert (status, len(jobs)) == (0, 1) and note in err and len(err.splitlines()) == bool(note), err


def test_a_loss_is_grpo_and_what_it_changes(compose):
    _, jobs, _ = compose("-m", "algorithm=grpo,dr_grpo,dapo,gspo,cispo,sapo,rloo,reinforce_pp")
    losses = [job.loss for job in jobs]
    assert len({repr(loss) for loss in losses}) == 8
    assert losses[3].clip_low == 3e-4 and losses[4].clip_low is None and losses[2].overlong.buffer == 0.2
    assert all(algorithm.kl.coefficient == 0 and algorithm.updates_per_rollout == 1 for loss in losses)


@pytest.mark.parametrize(
    "world, size, advice",
    [
        (1, None, "launch.nproc=4"),
        (2, None, "launch.nproc=4"),
        (5, None, "launch.nproc=4"),
        (4, 4, "fsdp.shard_size=2"),
        (4, 3, "fsdp.shard_size=2"),
        (8, 1, "fsdp.shard_size=2 or 4"),
        (9, None, "fsdp.shard_size=3"),
        (4, None, None),
        (4, 2, None),
        (6, 3, None),
    ],
)
def test_hybrid_shard(monkeypatch, world, size, advice):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    wrong = problems(GRPOConf(fsdp=FSDPConf(Strategy.hybrid_shard, shard_size=size)), world)
    assert len(wrong) == (advice is not None)
    assert all(advice in message for message in wrong)


def test_hybrid_shard_size_follows_the_nodes(monkeypatch):
    conf = FSDPConf(Strategy.hybrid_shard)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert [hybrid_shard_size(conf, world) for world in (8, 16, 32)] == [4, 8, 8]
    assert hybrid_shard_size(FSDPConf(Strategy.hybrid_shard, shard_size=2), 16) == 2


def test_shard_size_is_for_hybrid_shard_only(compose):
    """So that a sweep over strategies can set it once."""
    status, jobs, _ = compose("-m", "fsdp=full_shard,hybrid_shard", "fsdp.shard_size=2", world=4)
    assert status == 0 and [job.fsdp.shard_size for job in jobs] == [2, 2]


def test_a_job_survives_json(compose):
    _, (job,), _ = compose("task=gsm8k", "launch.nproc=2")
    values = OmegaConf.to_container(OmegaConf.structured(job), enum_to_str=True)
    assert typed("grpo", json.loads(json.dumps(values))) == job


def test_run_directory_keeps_interpolations(compose, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["grpo.py", "task=gsm8k", "hydra.run.dir=here"])

    def take(cfg) -> int:
        assert HydraConfig.get().job.name == "grpo"
        _, values = cli._checked("grpo", cfg, 1)
        cli._claim(cfg, values)
        return 0

    recipe = ROOT / "recipes" / "grpo.py"
    assert cli._read_command_line(recipe, take) == 0
    text = (tmp_path / "here" / "config.yaml").read_text()
    assert "max_new_tokens: ${task.max_new_tokens}" in text and "${when_embedded:" in text
    assert json.loads((tmp_path / "here" / "job.json").read_text())["rollout"]["max_new_tokens"] == 1024
    assert cli._read_command_line(recipe, take) == 2
    assert "holds a run already" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["grpo.py", "resume=auto"])
    assert cli._read_command_line(recipe, take) == 2
    assert "hydra.run.dir" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["a/b", "model.path=/x y/z", "long" * 100, "seed-1,fsdp-full_shard", "päth" * 60, "[1,2]"]
)
def test_file_names(name):
    safe = cli._file_name(name)
    assert "/" not in safe and " " not in safe and 0 < len(safe.encode()) < 255
    assert cli._file_name("long" * 100) != cli._file_name("long" * 101)


def test_sweep_is_refused_inside_a_rank(compose, monkeypatch, capsys):
    compose()
    for arguments in (["-m", "seed=1,2"], ["hydra.mode=MULTIRUN", "seed=1"]):
        monkeypatch.setattr(sys, "argv", ["grpo.py", *arguments])
        monkeypatch.setenv("WORLD_SIZE", "1")
        assert cli._order(ROOT / "recipes" / "grpo.py") == {"exit": 2, "job": None, "run_dir": None}
        assert capsys.readouterr().err.count("a sweep starts its own ranks") == 1


def test_hydra_own_values_are_ours(compose):
    """_self_ before the schema, or a group below Hydra's own defaults, silently resets values."""
    seen = []

    def take(cfg) -> int:
        seen.append(HydraConfig.get())
        return 0

    compose()  # sets argv
    cli._read_command_line(ROOT / "recipes" / "grpo.py", take)
    assert seen[0].output_subdir is None and seen[0].job.chdir is False
    assert Path(seen[0].runtime.output_dir).parts[-3:-1] == ("outputs", "grpo")


def script(tmp_path: Path, *arguments: str, **env: str) -> tuple[str, float]:
    """A recipe that tells which modules are loaded when the command line is done."""
    recipe = tmp_path / "recipes" / "grpo.py"
    recipe.parent.mkdir(exist_ok=True)
    if not (tmp_path / "conf").exists():
        (tmp_path / "conf").symlink_to(CONF)
    recipe.write_text(
        "import atexit, sys\n"
        "from posttrain.command.cli import main\n"
        "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\n"
        "main(__file__)\n"
    )
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(recipe), *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"} | env,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "False", "the parent has imported torch"
    return done.stdout, time.monotonic() - began


def test_help_and_cfg_are_instant(tmp_path):
    text, seconds = script(tmp_path, "--help")
    for group in (
        "model",
        "packing",
        "fsdp",
        "metrics",
        "task",
        "rollout",
        "loss",
        "optim",
        "logger",
        "sweep",
    ):
        assert f"\n  {group} " in text
    assert text.count("python recipes/grpo.py") == 3
    cfg, seconds_cfg = script(tmp_path, "--cfg", "job", "task=gsm8k")
    assert OmegaConf.create(cfg).task.path == "openai/gsm8k"
    assert max(seconds, seconds_cfg) < 5  # 0.3 s on an idle machine


def test_tab_completion(tmp_path):
    line = "python recipes/grpo.py pack"
    out, _ = script(tmp_path, "-sc", "query=bash", COMP_LINE=line, COMP_POINT=str(len(line)))
    assert "packing=" in out


def test_typed_refuses_what_the_schema_lacks():
    with pytest.raises(UserError, match="nonsense: no such key"):
        typed("evaluate", {"task": {"name": "arithmetic"}, "nonsense": 1})
