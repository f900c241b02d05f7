"""Simulations with the modules that decide compiled by mypyc, which takes half of the time.

    python -m bench.compiled bench.probe_simulator --trials 100 ...

The figures are the same to the last digit. It needs a C compiler and Python's headers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMPILED = (
    "dshealthd/probe/verdicts/*.py",
    "dshealthd/probe/observation.py",
    "dshealthd/probe/members/schedule.py",
    "bench/probe_simulator.py",
)
_SETUP = """\
from glob import glob
from mypyc.build import mypycify
from setuptools import setup
files = sorted(file for pattern in {patterns!r} for file in glob(pattern))
setup(name="compiled", packages=[], ext_modules=mypycify(files, opt_level="3"))
"""


def compile_into(folder: Path) -> None:
    """Copy the packages to a folder, and compile there what a simulated day runs."""
    for package in ("dshealthd", "bench"):
        shutil.copytree(
            ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    (folder / "setup.py").write_text(_SETUP.format(patterns=COMPILED), encoding="utf-8")
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=folder,
        check=True,
        stdout=sys.stderr,
    )


def run_in(folder: Path, code: str, *arguments: str) -> None:
    """Run Python code with what was compiled into a folder."""
    subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=folder,
        check=True,
    )


def main() -> None:
    """Compile, and run the module of the command line."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        compile_into(Path(folder))
        run_in(Path(folder), f"from {sys.argv[1]} import main; main()", *sys.argv[2:])


if __name__ == "__main__":
    main()
