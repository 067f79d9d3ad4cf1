"""Four small runs against their record, tests/data/same.json; and the comparison itself, which `make same` prints.

The other tests say what is right; this one notices when a number moves that nobody meant to move.
"""

import json
import math
import subprocess

import pytest
import same

# Other instruction sets and BLAS paths of one machine come to a fifth of this: a gradient norm moves by up to 4e-5
# of itself, and what is nothing but rounding, as the gap between sampler and trainer is, by up to 4e-6. At the
# rates of these runs, that is: twice dapo's rate multiplied its rounding by ten.
RELATIVE, ABSOLUTE = 2e-4, 2e-5


def as_on_record(name: str, recorded: float, here: float) -> bool:
    """Counts and what follows from them alone exactly, the rest as far as processors agree."""
    if isinstance(recorded, int) or name.startswith(("packing/", "perf/flops_")):
        return recorded == here
    return math.isclose(recorded, here, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


@pytest.mark.parametrize("configuration", same.CONFIGURATIONS)
def test_the_numbers_of_a_small_run_are_those_on_record(configuration):
    recorded = json.loads(same.RECORD.read_text())[configuration]
    count, found = same.differences(recorded, same.run(same.ROOT, configuration), as_on_record)
    assert count > 90
    advice = "a change of numbers is a deliberate commit: `python tests/same.py --record`"
    assert not found, f"{same.report(configuration, count, found)}\n{advice}"


BASE = [{"step": 1, "loss": 0.1, "num_tokens": 7, "sampling/kl": 1e-9}, {"step": 2, "eval/reward": 0.5}]


def test_the_smallest_difference_is_named():
    loss = math.nextafter(0.1, 1)
    count, found = same.differences(BASE, [BASE[0] | {"loss": loss}, BASE[1]])
    assert count == 6 and found == [(1, "loss", 0.1, loss)]
    assert same.report("plain", count, found).splitlines() == [
        "plain: 6 values compared, 1 differs",
        "  step 1  loss  base 0.1  here 0.10000000000000002",
    ]
    assert same.report("plain", *same.differences(BASE, BASE)) == "plain: 6 values compared, none differ"
    assert same.differences([{"step": 1, "loss": 0.0}], [{"step": 1, "loss": -0.0}])[1]


def test_names_and_records_that_one_side_lacks():
    here = [{"step": 1, "loss": 0.1, "num_tokens": 7, "new": 3.0}]
    assert same.differences(BASE, here)[1] == [
        (None, "number of records", 2, 1),
        (1, "new", None, 3.0),
        (1, "sampling/kl", 1e-9, None),
    ]
    assert [name for _, name, *_ in same.differences(BASE, here, left_out=["n?w", "sampling/*"])[1]] == [
        "number of records"
    ]


def test_many_differences_are_cut_short():
    found = [(step, "loss", 1.0, 2.0) for step in range(30)]
    lines = same.report("plain", 100, found).splitlines()
    assert lines[0] == "plain: 100 values compared, 30 differ" and lines[-1] == "  and 10 more" and len(lines) == 22


@pytest.mark.parametrize(
    "name, is_compared",
    [("loss", True), ("perf/flops_update", True), ("perf/mfu", False), ("time/rollout", False), ("entropy", False)],
)
def test_what_is_compared(name, is_compared):
    assert same.compared(name, ["entropy", "sampling/*"]) == is_compared


def test_counts_are_exact_and_floats_close():
    assert as_on_record("num_tokens", 700, 700) and not as_on_record("num_tokens", 100_000, 100_001)
    assert not as_on_record("perf/flops_update", 1e9, 1e9 + 1)
    assert as_on_record("grad_norm", 2.0, 2.00002) and not as_on_record("grad_norm", 2.0, 2.001)


def in_git(*words: str) -> str:
    git = subprocess.run(["git", "-C", str(same.ROOT), *words], capture_output=True, text=True)
    if git.returncode:
        pytest.skip("the sources are not in git here")
    return git.stdout.strip()


def test_no_commit_is_one_line_and_exit_status_2(capsys):
    in_git("rev-parse", "HEAD")
    assert same.main([]) == 2
    assert capsys.readouterr().err == "a commit to compare with is missing: make same BASE=<commit>\n"
    assert same.main(["no-such-commit"]) == 2
    assert capsys.readouterr().err == "no-such-commit: there is no such commit\n"


def test_an_exception_for_everything_compares_nothing(monkeypatch, capsys):
    commit = in_git("rev-parse", "HEAD")
    monkeypatch.setattr(same, "run", lambda tree, configuration: BASE)
    assert same.main([commit, "--except", "*"]) == 2
    assert capsys.readouterr().err == "--except * leaves nothing to compare\n"


@pytest.mark.parametrize("loss, status", [(0.1, 0), (0.2, 1)])
def test_against_a_commit(monkeypatch, capsys, loss, status):
    """The runs are stood in for: one each of the commit's tree and of this one. The worktree is gone afterwards."""
    commit, trees = in_git("rev-parse", "HEAD"), []

    def run(tree, configuration):
        assert (tree / "recipes" / "grpo.py").exists()
        trees.append(tree)
        return BASE if tree != same.ROOT else [BASE[0] | {"loss": loss, "sampling/kl": 1.0}, BASE[1]]

    monkeypatch.setattr(same, "run", run)
    assert same.main([commit, "--except", "sampling/*"]) == status
    assert len(set(trees)) == 2 and len(trees) == 2 * len(same.CONFIGURATIONS)
    assert str(trees[0]) not in in_git("worktree", "list") and not trees[0].exists()
    out = capsys.readouterr().out
    assert out.startswith("left out: sampling/*\n") and out.count("5 values compared") == len(same.CONFIGURATIONS)
    assert out.count("step 1  loss  base 0.1  here 0.2") == (len(same.CONFIGURATIONS) if status else 0)


def test_a_run_that_failed_says_its_last_lines(monkeypatch, capsys):
    monkeypatch.setitem(same.CONFIGURATIONS, "plain", "steps=0")
    with pytest.raises(same.Failed, match="(?s)plain failed in .*steps=0: must be 1 or more"):
        same.run(same.ROOT, "plain")
