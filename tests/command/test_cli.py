"""What is typed: jobs, run directories, `--help`, and every kind of mistake in our words."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from composition import CONF, composer
from conftest import ROOT
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from posttrain.command import cli, run_directory
from posttrain.config.validation import typed
from posttrain.errors import UserError


@pytest.fixture
def compose(tmp_path, monkeypatch, capsys):
    return composer(tmp_path, monkeypatch, capsys)


def test_relative_paths_are_seen_from_where_they_were_typed(compose, tmp_path):
    (tmp_path / "data.jsonl").touch()
    _, (job,), _ = compose("task=jsonl", "task.path=data.jsonl", "model.path=Qwen/Qwen3.5-4B")
    assert job.task.path == str(tmp_path / "data.jsonl")
    assert job.model.path == "Qwen/Qwen3.5-4B"
    listed = ("task.path=[data.jsonl,*.jsonl,none.csv]", "task.eval_path=[no,where]")
    _, (job,), _ = compose("task=jsonl", *listed)
    assert job.task.path == [str(tmp_path / "data.jsonl"), str(tmp_path / "*.jsonl"), "none.csv"]
    assert job.task.eval_path == ["no", "where"]
    _, (job,), _ = compose("task=hub", "task.path=openai/gsm8k", "task.config=main", "task.split='train[:9]'")
    assert (job.task.path, job.task.split, job.task.eval_split) == ("openai/gsm8k", "train[:9]", None)


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
        (["algorithm.beta=0.1"], ["algorithm.beta: no such key; here it is algorithm.kl.coefficient"]),
        (["algorithm.epsilon=0.1"], ["here it is algorithm.clip_low and algorithm.clip_high"]),
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


def test_run_directory_keeps_interpolations(compose, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["grpo.py", "task=gsm8k", "hydra.run.dir=here"])

    def take(cfg) -> int:
        assert HydraConfig.get().job.name == "grpo"
        _, values = cli._checked("grpo", cfg, 1)
        run_directory.claim(cfg, values)
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
    safe = run_directory.file_name(name)
    assert "/" not in safe and " " not in safe and 0 < len(safe.encode()) < 255
    assert run_directory.file_name("long" * 100) != run_directory.file_name("long" * 101)


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
        "algorithm",
        "optim",
        "logger",
        "sweep",
    ):
        assert f"\n  {group} " in text
    assert f"{'optim.lr':<34}{'1e-06':<20}the learning rate, after warmup\n" in text
    assert f"{'packing.mode':<54}how documents fill a micro-batch (thd, padded)\n" in text
    assert text.count("  task.heldout ") == 2  # of made-up problems, and of a file's rows
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
