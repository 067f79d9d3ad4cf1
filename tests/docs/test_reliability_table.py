"""Every fault that docs/reliability.md lists has its tests."""

import re

from conftest import ROOT


def test_each_fault_names_tests_that_there_are():
    rows = re.findall(r"^\| (?!what happens|---|option)[^\n]* \| ([\w, ]+) \|$", _faults(), re.MULTILINE)
    named = {name for row in rows for name in row.split(", ")}
    there = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        there |= set(re.findall(r"^def test_(\w+)", file.read_text(), re.MULTILINE))
    assert len(rows) > 20 and named - there == set()


def _faults() -> str:
    return (ROOT / "docs/reliability.md").read_text().partition("## Faults")[2].partition("\n## ")[0]
