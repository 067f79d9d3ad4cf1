"""recipes/preflight.py as it is typed: its three exit statuses, JSON, and that one refusal hides no other."""

import json

from conftest import command


def preflight(directory, *overrides, **environment):
    process = command("preflight", f"hydra.run.dir={directory}", *overrides, **environment)
    report = directory / "preflight.json"
    return process, json.loads(report.read_text()) if report.exists() else None


def part(report, name):
    return next(each for each in report["parts"] if each["name"] == name)


def test_the_default_run_will_start(tmp_path):
    process, report = preflight(tmp_path / "run")
    assert process.returncode == 0, process.stdout
    assert process.stdout.rstrip().endswith("the run will start")
    names = ["model", "task", "answers", "packing", "sampler", "FLOPs", "step", "memory", "export"]
    assert [each["name"] for each in report["parts"]] == names and report["verdict"] == "right"
    assert "64 of 64 reference answers score 1" in process.stdout and "3+32=" in process.stdout
    step = part(report, "step")["facts"]
    assert step["completions"] == 256 and step["computed_tokens"] >= step["tokens"]
    assert part(report, "memory")["facts"]["update"]["weights"] == 4 * 449_560


def test_json_alone_on_stdout_and_what_is_worth_a_look(tmp_path):
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(20)] + [{"prompt": "x", "answer": None}]
    rows[3]["answer"] = "many"
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ["task=jsonl", f"task.path={tmp_path}/mine.jsonl", "task.answer_reward=numeric", "task.heldout=0"]
    process, report = preflight(tmp_path / "run", *options, "--json")
    assert process.returncode == 1, process.stdout
    assert json.loads(process.stdout) == report and report["exit_status"] == 1
    assert part(report, "task")["facts"]["dropped"] == {"no answer": 1}
    (warning,) = part(report, "answers")["warnings"]
    assert "cannot be scored" in warning and "'many'" in warning


def test_all_refusals_at_once(tmp_path):
    """A model that leaks, a task that is not there, more memory than a device has."""
    process, report = preflight(
        tmp_path / "run", "task=jsonl", "task.path=nowhere.jsonl", "model.path=/no/where", "launch.nproc=64"
    )
    assert process.returncode == 2, process.stdout
    refused = {each["name"]: each["refusals"] for each in report["parts"] if each["refusals"]}
    assert set(refused) == {"model", "task"}
    assert "neither a directory nor a hub name" in refused["model"][0]


def test_memory_is_compared_with_a_device_of_the_users(tmp_path):
    process, report = preflight(tmp_path / "run", "memory_gb=0.001", "launch.nproc=8")
    assert process.returncode == 1, process.stdout
    assert part(report, "memory")["warnings"] and "on 8 ranks" in process.stdout
