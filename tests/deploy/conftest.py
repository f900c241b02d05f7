"""The packages under test, built once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.machine import require_tools

BUILD = Path(__file__).parents[2] / "deploy/package/build.py"
BEFORE = "0.0.9"
"""A version before every released one, for upgrades."""


def build(output: Path, *flags: str, kind: str = "deb") -> Path:
    """Build the package of a kind and return it."""
    command = [sys.executable, str(BUILD), "--format", kind, "--output", str(output), *flags]
    subprocess.run(command, check=True, timeout=1800)
    (made,) = output.glob(f"*.{kind}")
    return made


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Debian package of this checkout."""
    require_tools()
    return build(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="session")
def package_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the number of a version before."""
    require_tools()
    return build(tmp_path_factory.mktemp("before"), "--version", BEFORE)
