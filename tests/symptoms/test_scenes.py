"""What the alerts do in the scenes of tests/symptoms/*.yml, played by promtool."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.symptoms.promtool import FILES, promtool, pruned


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_scenes(file: Path, tmp_path: Path) -> None:
    """Alerts fire on the faults, not on the near misses, and clear afterwards."""
    promtool("test", "rules", pruned(file, tmp_path))
