"""Secrets of nodes for tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.probe.peering import KEY, secret


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """The key file of all nodes."""
    return secret(tmp_path, "key", KEY)
