"""Secrets of nodes for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.probe.peering import KEY, secret

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """The key file of all nodes."""
    return secret(tmp_path, "key", KEY)
