"""Every metric of four small runs of recipes/grpo.py: as on another commit, or as on record.

    make same BASE=<commit>                                       this tree and that commit, exactly
    make same BASE=<commit> ARGS="--except entropy 'sampling/*'"  apart from what is meant to differ
    python tests/same.py --record                                 write tests/data/same.json, which test_same.py reads

A change that should leave the numbers alone shows here that it does: same seeds, same machine, one thread a rank, and
every value of every record compared by its repr. Times and memory are not compared, FLOPs are. The exit status is 0
where all is equal, 1 where something differs, 2 where there is no such commit or a run failed.
"""

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "data" / "same.json"
SHOWN = 20  # differences of one configuration that are printed

# A rate at which weights move, micro-batches of a few documents, evaluations in between, no peak to measure, and
# tracebacks, since the logs of a failed run are gone with its directory.
ALL = """
    model=qwen3_5_dense steps=3 prompts_per_step=8 optim.lr=1e-3 optim.warmup_steps=1 packing.tokens_per_row=128
    evaluation.prompts=64 evaluation.every=2 checkpoint.every=0 checkpoint.export=false
    metrics.peak_tflops=1 launch.nproc=1 launch.threads=1 debug=true
"""

# Beyond what its name says, a configuration sets what would have no effect in so small a run by default. Few new
# tokens make overlong and truncated completions common, small rewards let advantages depend on the epsilon of their
# scale, a large weight decay acts within three steps, and from the second mini-batch on ratios meet the clip.
CONFIGURATIONS = {
    "plain": "algorithm=grpo packing=thd",
    "dapo": """
        algorithm=dapo algorithm.mini_batches=2 algorithm.updates_per_rollout=2 algorithm.overlong.buffer=0.5
        algorithm.overlong.factor=0.3 algorithm.entropy_coefficient=0.01 algorithm.off_policy_threshold=0.1
        rollout.max_new_tokens=4 rollout.group_size=4 rollout.temperature=0.8
        optim.lr=5e-4 optim.schedule=linear optim.weight_decay=10 seed=1
    """,
    "kl": """
        algorithm=dr_grpo algorithm.kl.coefficient=0.05 algorithm.kl.refresh_every=2 algorithm.kl.refresh_mix=0.5
        algorithm.kl.reference=cpu algorithm.mini_batches=2 algorithm.mask_truncated=true
        rollout.max_new_tokens=3 rollout.temperature=1.3 rollout.batch_size=32 evaluation.temperature=0.7
        packing=padded packing.pad_multiple=16 optim.schedule=constant steps=4 seed=2
    """,
    "gspo": """
        algorithm=gspo algorithm.mini_batches=2 algorithm.advantage_baseline=leave_one_out
        task.reward_correct=0.009 task.reward_format=0.001 rollout.top_p=0.9
        launch.nproc=2 fsdp=full_shard packing.tokens_per_row=64 optim.betas=[0.8,0.95] optim.max_grad_norm=inf seed=3
    """,
}

Record = dict[str, float]
Difference = tuple[int | None, str, object, object]  # step, name, base, here


class Failed(Exception):
    """What cannot be compared, in words."""


def compared(name: str, left_out: Sequence[str] = ()) -> bool:
    """Not times, nor what depends on them or on memory, nor what matches one of the patterns."""
    measured = name.startswith(("time/", "perf/")) and not name.startswith("perf/flops_")
    return not measured and not any(fnmatch.fnmatchcase(name, pattern) for pattern in left_out)


def run(tree: Path, configuration: str) -> list[Record]:
    """The compared values of each record that recipes/grpo.py of this tree writes. Raises Failed."""
    # The group `algorithm` was once called `loss`.
    group = "algorithm" if (tree / "conf" / "algorithm").is_dir() else "loss"
    words = f"{ALL} {CONFIGURATIONS[configuration]}".split()
    overrides = [group + word.removeprefix("algorithm") if word.startswith("algorithm") else word for word in words]
    environment = {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.run(
            [sys.executable, str(tree / "recipes" / "grpo.py"), *overrides, f"hydra.run.dir={folder}/run"],
            cwd=tree,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if process.returncode:
            raise Failed(f"{configuration} failed in {tree}:\n" + "\n".join(process.stdout.splitlines()[-20:]))
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if compared(name)} for line in lines]


def exactly(name: str, base: float, here: float) -> bool:
    return repr(base) == repr(here)


def differences(
    base: Sequence[Record],
    here: Sequence[Record],
    equal: Callable[[str, float, float], bool] = exactly,
    left_out: Sequence[str] = (),
) -> tuple[int, list[Difference]]:
    """How many values were compared, and each that differs. A value that one side lacks is None there."""
    count, found = 0, []
    if len(base) != len(here):
        found.append((None, "number of records", len(base), len(here)))
    for one, other in zip(base, here, strict=False):
        for name in sorted(one.keys() | other.keys()):
            if not compared(name, left_out):
                continue
            count += 1
            if not (name in one and name in other and equal(name, one[name], other[name])):
                found.append((one["step"], name, one.get(name), other.get(name)))
    return count, found


def report(configuration: str, count: int, found: Sequence[Difference]) -> str:
    """How many values of a configuration were compared, and the first of those that differ."""
    lines = [f"{configuration}: {count} values compared, {len(found) or 'none'} differ{'s' * (len(found) == 1)}"]
    lines += [f"  step {step}  {name}  base {base!r}  here {here!r}" for step, name, base, here in found[:SHOWN]]
    return "\n".join(lines + [f"  and {len(found) - SHOWN} more"] * (len(found) > SHOWN))


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A temporary worktree of the commit. Raises Failed."""

    def git(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)

    if git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}").returncode:
        raise Failed(f"{commit}: there is no such commit")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base"
        try:
            if (added := git("worktree", "add", "--detach", str(tree), commit)).returncode:
                raise Failed(f"{commit}: {added.stderr.strip()}")
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def against(commit: str, left_out: Sequence[str]) -> int:
    """Compare this tree with the commit; the exit status."""
    if left_out:
        print(f"left out: {' '.join(left_out)}", flush=True)
    different, compared_in_all = False, 0
    with checked_out(commit) as tree:
        for configuration in CONFIGURATIONS:
            print(f"{configuration}: running {commit}", flush=True)
            base = run(tree, configuration)
            print(f"{configuration}: running {ROOT}", flush=True)
            count, found = differences(base, run(ROOT, configuration), left_out=left_out)
            print(report(configuration, count, found), flush=True)
            different, compared_in_all = different or bool(found), compared_in_all + count
    if not compared_in_all:
        raise Failed(f"--except {' '.join(left_out)} leaves nothing to compare")
    return int(different)


def record() -> int:
    """Write the record that test_same.py compares with, a line for each record of a run."""
    texts = []
    for configuration in CONFIGURATIONS:
        print(f"{configuration}: running {ROOT}", flush=True)
        lines = [f"    {json.dumps(each, sort_keys=True)}" for each in run(ROOT, configuration)]
        texts.append(f'  "{configuration}": [\n' + ",\n".join(lines) + "\n  ]")
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text("{\n" + ",\n".join(texts) + "\n}\n")
    return 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", help="commit to compare with")
    parser.add_argument("--except", dest="left_out", nargs="+", default=[], metavar="NAME", help="names to leave out")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    try:
        if options.record:
            return record()
        if not options.base:
            raise Failed("a commit to compare with is missing: make same BASE=<commit>")
        return against(options.base, options.left_out)
    except Failed as failure:
        print(failure, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
