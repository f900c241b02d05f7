"""From a fault that only probes can tell to its ticket."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.lab import faults
from tests.lab.catalogue import FAULTS
from tests.lab.paging import Paging
from tests.lab.probing import KNOWN, echoes_are_known
from tests.waiting import until

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


@pytest.mark.timeout(900)
def test_node_that_only_prometheus_does_not_reach(tmp_path: Path) -> None:
    """A node that is not scraped while others meet it in rounds is a ticket; when it dies, it is a
    page.
    """
    with Paging(tmp_path, 4, gpus=1, period=3.0) as lab:
        lab.until_watched()
        known = 'count(dshealthd:member:hash) + count(dshealthd_probe_member_hash{of="met"}) == 8'
        until(lambda: lab.prometheus.query(known), lambda: "not all nodes have met others")
        node = lab.lab.nodes[1]

        def told() -> set[str]:
            return {
                alert.labels["severity"]
                for alert in lab.receiver.firing()
                if (alert.labels["symptom"], alert.labels.get("node")) == ("agent-gone", node.name)
            }

        with faults.unscraped(node):
            assert lab.receiver.wait(told, GOES), lab.pending()
            assert told() == {"warning"}
            with faults.drop_all(node):
                assert lab.receiver.wait(lambda: "critical" in told(), GOES), lab.pending()
        assert lab.receiver.wait(lambda: not told(), GOES), lab.pending()
