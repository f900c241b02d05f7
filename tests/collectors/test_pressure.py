"""Pressure stall information, on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from dshealthd.collectors.pressure import STALLED
from tests.collectors.bench import Bench, value


@pytest.mark.skipif(not Path("/proc/pressure/cpu").exists(), reason="a kernel without PSI")
def test_this_machine() -> None:
    """The values lie between what the kernel says before and after."""

    def total() -> int:
        return int(Path("/proc/pressure/cpu").read_text().split("total=")[1].split()[0])

    before, result, after = total(), Bench("pressure").collect(), total()
    stalled = value(result, STALLED, "cpu", "some")
    assert stalled is not None
    assert before <= round(stalled * 1e6) <= after
