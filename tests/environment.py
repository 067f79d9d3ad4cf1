"""Virtual environments on top of the one that runs the tests, for packages that it should not have."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment(folder: Path, *install: str) -> Path:
    """The interpreter of a new environment in `folder`: what `pip install` gets, then this one's packages and src/.

    What pip finds good enough here is shared, torch above all. Errors: CalledProcessError, pip has said why.
    """
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    here = next(path for path in sys.path if path.endswith("site-packages"))
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "outer.pth").write_text(f"{here}\n{ROOT / 'src'}\n")
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *install], check=True)
    return python
