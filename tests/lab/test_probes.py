"""Agents that probe each other name each fault for what it is and where it is, accuse nobody else,
and take it back when it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.lab import faults
from tests.lab.node import Node
from tests.lab.probe_faults import killed, other_key, other_members
from tests.lab.probing import CLEAR, DISAGREES, PORT, Probing, begun, named, rounds, suspects
from tests.symptoms.chain import played

# Not part of the ordinary run yet: some faults are not named in time on two busy cores. `make
# test-lab` runs them.
pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probing]:
    """Four nodes without torch: their rounds are echoes between the agents."""
    with Probing(tmp_path_factory.mktemp("light"), 4, full=False) as lab:
        yield begun(lab)


def test_agent_dead(light: Probing) -> None:
    """A node whose agent is gone is named by all others: it is there and refuses."""
    one, two, *others = light.nodes
    named(light, killed(two), two, {"refused"}, by=(one, *others), epochs=15)


def test_refused_by_firewall(light: Probing, tmp_path: Path) -> None:
    """A firewall that answers all TCP of a node with RST makes it a node that refuses, which
    pages.
    """
    one, two, *others = light.nodes
    told = named(light, faults.reset(two), two, {"refused"}, by=(one, *others), epochs=15)
    assert played("DshealthdProbeFails", told, tmp_path) == (False, True)


def test_port_refused_by_firewall(light: Probing) -> None:
    """The same where only the port of the peer API is shut, and the node's own calls to others go
    through.
    """
    _, two, *_ = light.nodes
    named(light, faults.reset(two, PORT), two, {"refused"}, by=(), epochs=20)


@pytest.mark.parametrize(
    ("differs", "reason", "lists"),
    [(other_key, "key", 1), (other_members, "members_differ", 2)],
)
def test_what_differs(
    light: Probing,
    differs: Callable[[Node], AbstractContextManager[None]],
    reason: str,
    lists: int,
) -> None:
    """A node with another key or list of members accuses nobody, nor is it; all see with whom they
    disagree.
    """
    one, two, *others = light.nodes
    with differs(two):
        found = light.await_(
            lambda s: all(
                s[node.name].value(DISAGREES, peer="node-2", reason=reason)
                for node in (one, *others)
            ),
            12,
            "disagreement",
        )
        assert len({scrape.value("dshealthd_members_hash") for scrape in found.values()}) == lists
        assert not any(map(suspects, found.values())), light.told(found)
    light.await_(
        lambda s: not any(scrape.all(DISAGREES) for scrape in s.values()), CLEAR, "agreement"
    )


@pytest.mark.parametrize(
    "seconds", [288, -288, 10 * 365 * 86400], ids=["ahead", "behind", "ten_years"]
)
def test_clock_off(light: Probing, seconds: float) -> None:
    """A node whose clock is off is told by name and reason, and nobody is accused; others' rounds
    go on.
    """
    one, two, *others = light.nodes
    with faults.clock_offset(two, seconds):
        light.await_(
            lambda s: all(
                s[node.name].value(DISAGREES, peer="node-2", reason="clock_differs")
                for node in (one, *others)
            ),
            20,
            "clock",
        )
        before = light.scrapes()
        light.await_(
            lambda s: all(
                rounds(s[node.name], outcome="ok") >= rounds(before[node.name], outcome="ok") + 2
                for node in (one, *others)
            ),
            12,
            "rounds of the others",
        )
        light.await_(
            lambda s: not any(map(suspects, s.values())),
            CLEAR,
            "no suspect, once it is forgotten that it was being restarted",
        )
        for scrape in light.scrapes().values():
            assert all(
                0 <= took < 30 for took in scrape.all("dshealthd_collector_duration_seconds")
            )
            # Of all rounds so far: their mean, as a busy machine adds up half a minute of short
            # ones.
            took, ended = (
                sum(scrape.all(f"dshealthd_probe_duration_seconds_{what}"))
                for what in ("sum", "count")
            )
            assert 0 <= took < 30 * ended
            assert all(each >= 0 for each in scrape.all("dshealthd_probe_duration_seconds_sum"))
    light.await_(
        lambda s: (
            len(s) == 4
            and not any(scrape.all(DISAGREES) or suspects(scrape) for scrape in s.values())
        ),
        2 * CLEAR,
        "agreement",
    )
