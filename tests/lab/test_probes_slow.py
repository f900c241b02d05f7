"""What is slow shows in the times of collectives with gloo.

Epochs are longer, as slow rounds must end within one: a slow pair's takes over three seconds. With
the next epoch skipped, a node would meet no others in the two epochs of which it tells its peers.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from dshealthd.probe.observation import HARD
from tests.agents import Scrape
from tests.lab import faults
from tests.lab.probing import CLEAR, KNOWN, Probing, begun, named, suspects
from tests.symptoms.chain import played

SCORE = "dshealthd_probe_score_ratio"
RATE = 10
"""Mbit/s. With it 64 KiB take 56 ms. Without, gloo takes 0.7 ms or waits for a scheduler's tick of
4 ms: as chance has it either is usual, and only what takes ten times as long counts as slow here.
"""
WELL = 1.15
"""Below this no machine is slow: the threshold of the alert is 1.2."""
SLOW = 3.0
"""More than what other work on this machine does to all nodes at once."""
pytestmark = [pytest.mark.lab, pytest.mark.timeout(200)]  # see test_probes.py


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probing]:
    """Four nodes that know what is usual for their collectives."""
    with Probing(tmp_path_factory.mktemp("slow"), 4, period=4.0) as lab:
        yield begun(lab, KNOWN)


def test_slow_node(full: Probing) -> None:
    """A slow node shows in the times of its collectives, and is named by itself."""
    _, two, *_ = full.nodes
    named(full, faults.slow(two, RATE), two, {"slow"}, by=(two,), epochs=25)


def test_slow_pair(full: Probing) -> None:
    """A slow way between two nodes that are well with others is named as the link, by both."""
    one, two, *_ = full.nodes
    named(full, faults.slow_pair(one, two, RATE), (one, two), {"slow"}, by=(one, two), epochs=30)


def usual(scrapes: Mapping[str, Scrape]) -> float:
    """Return the median of the nodes' own scores, 1 being usual for each."""
    scores = [score for scrape in scrapes.values() for score in scrape.all(SCORE)]
    return statistics.median(scores) if len(scores) == len(scrapes) else float("nan")


def test_slow_fabric(full: Probing, tmp_path: Path) -> None:
    """Row 25: every node's network is slow at once, so that none is slower than its peers: the
    fabric is, by the nodes' own scores, which fire the shipped alert and did not before.
    """
    well = full.await_(
        lambda s: (
            len(s) == len(full.nodes) and usual(s) < WELL and not any(map(suspects, s.values()))
        ),
        10 * CLEAR,
        f"a median score below {WELL}",
    )
    with contextlib.ExitStack() as stack:
        for node in full.nodes:
            stack.enter_context(faults.slow(node, 15))
        ill = full.await_(
            lambda s: len(s) == len(full.nodes) and SLOW < usual(s) < HARD,
            60,
            f"a median above {SLOW}, of rounds that end",
        )
    assert played("DshealthdFabricSlow", (well, ill), tmp_path) == (False, True)
