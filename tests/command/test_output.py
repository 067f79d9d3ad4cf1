"""A console that takes no more ends nothing, and is not tried again."""

import subprocess
import sys

from conftest import ROOT

CODE = """
import os, sys
sys.path.insert(0, {src!r})
from posttrain.command.output import make_best_effort
make_best_effort()
make_best_effort()
for n in range(20_000):
    print("line", n, flush=n % 7 == 0)
print("to stderr", file=sys.stderr)
open({done!r}, "w").write(f"{{sys.stdout.isatty()}} {{sys.stdout.encoding}}")
"""


def python(tmp_path, redirection):
    code = CODE.format(src=str(ROOT / "src"), done=str(tmp_path / "done"))
    shell = f'set -o pipefail; "$@" {redirection}'
    command = ["bash", "-c", shell, "bash", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done
    assert (tmp_path / "done").read_text() == "False utf-8"
    return done


def test_a_pipe_that_is_closed(tmp_path):
    done = python(tmp_path, "| head -1")
    assert done.stdout == "line 0\n" and done.stderr == "to stderr\n"


def test_a_full_disk(tmp_path):
    assert python(tmp_path, "> /dev/full").stderr == "to stderr\n"
    assert python(tmp_path, "> /dev/full 2>&1").stderr == ""


def test_a_console_that_takes_everything(tmp_path):
    assert python(tmp_path, "").stdout.count("\n") == 20_000
