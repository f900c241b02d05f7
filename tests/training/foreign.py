"""Environments as users have them: with torch, and without dshealthd.

Their torch is that of the tests, or that of the interpreter which `DSHEALTHD_TORCH_PYTHON` names.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from deploy.training import directory

VARIABLE = "DSHEALTHD_TORCH_PYTHON"
FIND = "import torch, os; print(os.path.dirname(torch.__path__[0]), torch.__version__, sep='\\n')"


class Torch(NamedTuple):
    """A PyTorch that is installed."""

    python: str
    """An interpreter that has it."""
    packages: str
    """The directory that it is in."""
    version: str

    @property
    def loads_backends(self) -> bool:
        """Return whether it calls entry points as it is imported."""
        major, minor = map(int, self.version.split(".")[:2])
        return (major, minor) >= (2, 5)


def torch() -> Torch | None:
    """Return the torch of the tests; None if there is none."""
    if python := os.environ.get(VARIABLE):
        found = subprocess.run([python, "-c", FIND], check=True, capture_output=True, text=True)
        return Torch(python, *found.stdout.splitlines())
    spec = importlib.util.find_spec("torch")  # imported, it would take seconds
    if spec is None or spec.origin is None:
        return None
    packages = Path(spec.origin).parents[1]
    return Torch(sys.executable, str(packages), importlib.metadata.version("torch"))


def environment(folder: Path, torch: Torch) -> Path:
    """Make an environment with torch, and return its interpreter."""
    subprocess.run([torch.python, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "torch.pth").write_text(torch.packages)
    return folder / "bin/python"


class Switch(NamedTuple):
    """A site's directory, and the interpreter of a foreign environment."""

    directory: Path
    python: Path

    @property
    def archive(self) -> str:
        """What the switch adds to PYTHONPATH."""
        return str(self.directory / directory.ARCHIVE)


def switch(folder: Path, torch: Torch) -> Switch:
    """Make the directory of a package, and an environment, unless one is named."""
    directory.make(folder / "training")
    named = os.environ.get(VARIABLE)
    python = Path(named) if named else environment(folder / "venv", torch)
    return Switch(folder / "training", python)
