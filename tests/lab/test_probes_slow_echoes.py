"""What is slow shows in the times of echoes between agents, of which only the leader knows the
time.

Epochs are longer than in the other scenes with echoes: beside other work agents send some for a
second, until one counts, and such rounds must end within an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab import faults
from tests.lab.probing import KNOWN, Probing, begun, echoes_are_known, named, until_both_lead

UNTIL_KNOWN = 900
"""Seconds that a test may last which waits until echoes are known: few are timed beside other
work."""
SLOW = 3
"""Mbit/s, at which the payload of an echo takes a fifth of a second.

Beside other work it takes 20 ms or more without a fault, which must be several times less.
"""
pytestmark = [pytest.mark.lab, pytest.mark.timeout(UNTIL_KNOWN)]  # see test_probes.py


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probing]:
    """Four nodes without torch that know how long their echoes usually take."""
    with Probing(tmp_path_factory.mktemp("light"), 4, full=False, period=2.0) as lab:
        begun(lab).await_(echoes_are_known(lab), 40 * KNOWN, "rounds led and timed by every node")
        yield lab


def test_slow_node(light: Probing) -> None:
    """A slow node is named by itself, and no link to it by others."""
    _, two, *_ = light.nodes
    named(light, faults.slow(two, SLOW), two, {"slow"}, by=(two,), epochs=15)


def test_slow_pair(light: Probing) -> None:
    """A slow way between two nodes that are well with others is named as the link, by both."""
    one, two, *_ = light.nodes
    until_both_lead(light, one, two)
    named(light, faults.slow_pair(one, two, SLOW), (one, two), {"slow"}, by=(one, two), epochs=25)
