"""From a fault that only probes can tell to its ticket."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.lab.catalogue import FAULTS
from tests.lab.paging import Paging
from tests.lab.probing import KNOWN, echoes_are_known

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.lab  # see test_probes.py

PERIOD = 1.0
COMES, GOES = 120.0, 300.0


@pytest.mark.timeout(900)
def test_slow_node(tmp_path: Path) -> None:
    """A node whose network is slow is told as such within a minute, nothing else is, and it is over
    after the fault.
    """
    fault = FAULTS["slow-node"]
    with Paging(tmp_path, 4, gpus=1, period=PERIOD) as lab:
        lab.until_watched()
        lab.lab.wait(echoes_are_known(lab.lab), 60 + 40 * KNOWN * PERIOD)
        assert [str(alert) for alert in lab.receiver.told()] == []
        node, begin = lab.lab.nodes[1], time.monotonic()
        with fault.inject(lab, node):
            came = lab.receiver.wait(
                lambda: any(fault.names(alert, node) for alert in lab.receiver.firing()), COMES
            )
            assert came, f"{[str(alert) for alert in lab.receiver.told()]}\n{lab.pending()}"
            print(f"told after {time.monotonic() - begin:.1f} s")
        assert lab.receiver.wait(lambda: not lab.receiver.firing(), GOES), [
            str(alert) for alert in lab.receiver.firing()
        ]
        assert [str(alert) for alert in lab.receiver.told() if not fault.names(alert, node)] == []
