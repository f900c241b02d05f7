"""The whole output of collectors that read files, on fixtures of a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dshealthd.config import registry
from dshealthd.core.collector import Context
from dshealthd.core.exposition import render
from dshealthd.core.host import Host
from dshealthd.core.result import CollectionOutcome, attempt

FIXTURES = Path(__file__).parent / "fixtures"
FILES = {"tcp_limits": "tcp"}
"""Fixtures of which another collector's files are read."""


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("infiniband", {}),
        ("job_environment", {}),
        ("kernel", {}),
        ("memory", {}),
        ("network", {}),
        ("pressure", {}),
        ("software", {"environments": (Path("/opt/venv"),)}),
        ("tcp", {}),
        ("tcp_limits", {}),
    ],
)
def test_golden(name: str, options: dict[str, Any]) -> None:
    """The fixture gives exactly the expected exposition, without a fault."""
    base = FIXTURES / FILES.get(name, name)
    host = Host(procfs=base / "proc", sysfs=base / "sys", rootfs=base / "root")
    kind = registry.load(name)
    result = attempt(kind(kind.Options(**options), Context(host=host, sweep=1)))
    assert (result.outcome, result.faults) == (CollectionOutcome.OK, ())
    assert render(result.samples) == (FIXTURES / name / "expected.prom").read_text()
