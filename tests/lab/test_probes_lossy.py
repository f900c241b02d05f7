"""A node that loses packets or is slow holds up the rounds of its peers, too, which meet others for
echoes beside them: these tell which of the two ends it is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.agents import Scrape
from tests.lab import faults
from tests.lab.node import Node
from tests.lab.probing import KNOWN, Probing, begun, suspects

pytestmark = [pytest.mark.lab, pytest.mark.timeout(400)]  # see test_probes.py

NAMED = 60.0
"""Seconds until the node is named; a machine with other work may take longer, and the test
waits."""
AFTER = 20.0
"""Seconds for which nothing else may be named afterwards, while the fault lasts."""


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probing]:
    """Four nodes that know what is usual for their collectives, with epochs as shipped."""
    with Probing(tmp_path_factory.mktemp("lossy"), 4, period=4.0) as lab:
        yield begun(lab, KNOWN)


def alone(lab: Probing, fault: AbstractContextManager[None], node: Node) -> None:
    """Inject a fault of a node; require that it is named, and neither another node nor the
    fabric.
    """

    def accused(scrapes: Mapping[str, Scrape]) -> set[str]:
        found = set().union(*map(suspects, scrapes.values()))
        wrong = {one for one in found if node.name not in one.component.split("--")}
        assert not wrong, f"{wrong}\n{lab.told(scrapes)}"
        return {one.component for one in found if one.kind == "node"}

    lab.await_(lambda scrapes: not any(map(suspects, scrapes.values())), 60, "nobody accused")
    with fault:
        begin = time.monotonic()
        lab.await_(accused, 4 * NAMED / lab.period, f"{node.name} named")
        print(f"{node.name} named after {time.monotonic() - begin:.1f} s")
        while time.monotonic() < begin + NAMED + AFTER:
            accused(lab.scrapes())
            time.sleep(1)


def test_loss(full: Probing) -> None:
    """A node that loses a fifth of all packets is named, and no other one."""
    node = full.nodes[1]
    alone(full, faults.loss(node, 0.2), node)


def test_a_tenth_of_the_rate(tmp_path: Path) -> None:
    """A node whose network has a tenth of the usual rate is named, and not the fabric as well."""
    with Probing(tmp_path, 4, period=5.0, large=True, slow_ratio=4.0) as lab:
        node = begun(lab, KNOWN).nodes[2]
        alone(lab, faults.slow(node, 100), node)
