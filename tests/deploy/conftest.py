"""The packages under test, built once."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.deploy.machine import require_tools

DEV = Path(__file__).parents[2] / "dev"
BEFORE = "0.0.9"
"""A version before every released one, for upgrades."""


def build(output: Path, *flags: str, kind: str = "deb") -> Path:
    """Build the package of a kind and return it."""
    command = [str(DEV), "package", "--format", kind, "--output", str(output), *flags]
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
    """The same with the number of a version before; $DSHEALTHD_TEST_BEFORE names a real one."""
    require_tools()
    if (before := os.environ.get("DSHEALTHD_TEST_BEFORE")) is not None:
        return Path(before)
    return build(tmp_path_factory.mktemp("before"), "--version", BEFORE)
