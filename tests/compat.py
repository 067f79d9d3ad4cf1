"""The packing tests on other versions of transformers: `make test-compat`, or `python tests/compat.py 5.17.0 ...`

Each version gets an environment of its own in .venv-compat/, on top of the one that runs this. Prints a Markdown
table at the end; exit status 1 if a test fails, or if a version that is too old is not refused by name.
"""

import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

from environment import ROOT, environment
from packaging.version import Version

from posttrain.models.gdn_packing import SUPPORTED

FOLDER = ROOT / ".venv-compat"
NAMES = (
    "models/packed/test_*",
    "models/test_gdn_packing",
    "models/test_shrink",
    "packing/test_rows",
    "packing/test_gaps",
)
TESTS = [path for name in NAMES for path in sorted(ROOT.glob(f"tests/models/{name}.py"))]
REFUSED = """
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig
from posttrain.errors import UserError
from posttrain.models.gdn_packing import patch
tiny = Qwen3_5TextConfig(hidden_size=32, num_hidden_layers=1, intermediate_size=32, vocab_size=64)
try:
    patch(AutoModelForCausalLM.from_config(tiny))
except UserError as error:
    print(error)
"""


def python_with(version: str) -> Path:
    """The interpreter of .venv-compat/<version>, made at the first call."""
    folder = FOLDER / version
    if not (folder / "installed").exists():
        print(f"{folder.relative_to(ROOT)}: pip install transformers=={version}", flush=True)
        environment(folder, f"transformers=={version}")
        (folder / "installed").touch()
    return folder / "bin" / "python"


def run_tests(python: Path) -> tuple[int, int, int]:
    """How many packing tests passed, failed and were skipped; their output goes through."""
    report = python.parents[1] / "report.xml"
    report.unlink(missing_ok=True)
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *TESTS]
    subprocess.run(pytest, cwd=ROOT)
    if not report.exists():  # it died before it could write one
        return 0, 1, 0
    suite = next(xml.etree.ElementTree.parse(report).iter("testsuite"))
    total, errors, failures, skipped = (int(suite.get(name)) for name in ("tests", "errors", "failures", "skipped"))
    return total - errors - failures - skipped, errors + failures, skipped


def check(version: str) -> tuple[str, bool]:
    """(the row of the table, whether it is as it should be)."""
    python = python_with(version)
    if SUPPORTED[0] <= Version(version) < SUPPORTED[1]:
        passed, failed, skipped = run_tests(python)
        return f"| {version} | {passed} | {failed} | {skipped} |", passed > 0 and failed == 0
    refused = subprocess.run([python, "-c", REFUSED], capture_output=True, text=True)
    named = f"transformers {version} is installed" in refused.stdout
    print(refused.stdout, refused.stderr[-2000:], flush=True)
    return f"| {version} | {'refused by name' if named else 'not refused'} | | |", named


def main(versions: list[str]) -> int:
    rows = [check(version) for version in versions]
    print("\n| transformers | passed | failed | skipped |\n|---|---|---|---|")
    print("\n".join(row for row, _ in rows), flush=True)
    return 0 if all(right for _, right in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
