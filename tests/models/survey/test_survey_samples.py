"""The table of samplers: rows as they are in the documentation, and its exit statuses."""

import json
import re

import pytest
from conftest import ROOT

from posttrain.models.survey import __main__ as survey
from posttrain.models.survey import samples
from posttrain.models.survey.tiny_models import builders

SHOWN = ["qwen3_5_text", "llama", "bart", "mamba", "roberta", "gemma3_text"]


@pytest.fixture(scope="module")
def checks():
    found = [samples.Check(architecture=name) for name in SHOWN]
    for result, build in zip(found, builders(SHOWN, None).values(), strict=True):
        samples.look(result, build)
    return found


def test_rows_are_those_of_the_documentation(checks):
    table = (ROOT / "docs/tables/samples.md").read_text()
    for result in checks:
        (row,) = re.findall(rf"^\| {result.architecture} \| (.*) \|$", table, re.MULTILINE)
        assert row.split(" | ")[-1].partition(":")[0] == result.verdict
    assert {result.architecture: result.verdict for result in checks} == {
        "qwen3_5_text": "samples", "llama": "samples", "bart": "one prompt a batch", "mamba": "refused",
        "roberta": "refused", "gemma3_text": "samples",
    }  # fmt: skip


def test_no_reason_is_a_raw_message():
    table = (ROOT / "docs/tables/samples.md").read_text()
    assert table.count("\n| ") == 189 + 1
    for verdict in re.findall(r"\| (refused[^|]*) \|$", table, re.MULTILINE):
        assert re.match("refused: [a-zA-Z]", verdict) and len(verdict) < 260


@pytest.mark.parametrize("names, status", [(["qwen3"], 0), (["qwen3", "bart"], 1)])
def test_the_command(monkeypatch, capsys, names, status):
    monkeypatch.setattr("sys.argv", ["survey", "samples", *names, "--json"])
    assert survey.main() == status
    found = json.loads(capsys.readouterr().out)
    assert [check["architecture"] for check in found["checks"]] == names
