"""The whole output of collectors that read files, on fixtures of a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dshealthd.core.result import CollectionOutcome
from tests.collectors.bench import FIXTURES, Bench, exposed

FILES = {"tcp_limits": "tcp"}
"""Fixtures of which another collector's files are read."""


@pytest.mark.parametrize(("name", "options"), [
    ("disk", {}),
    ("infiniband", {"exclude": ("mlx5_3",)}),
    ("job_environment", {}),
    ("kernel", {}),
    ("memory", {}),
    ("network", {}),
    ("open_files", {}),
    ("pressure", {}),
    ("software", {"environments": (Path("/opt/venv"),)}),
    ("tcp", {}),
    ("tcp_limits", {}),
])  # fmt: skip
def test_golden(name: str, options: dict[str, Any]) -> None:
    """The fixture gives exactly the expected exposition, without a fault."""
    result = Bench(name, FIXTURES / FILES.get(name, name), **options).collect()
    assert (result.outcome, result.faults) == (CollectionOutcome.OK, ())
    assert exposed(result.samples) == (FIXTURES / name / "expected.prom").read_text()
