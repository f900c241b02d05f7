"""What is shown of ranks that the text form does not name."""

from __future__ import annotations

from dshealthd.jobs.ras.progress import JobProgress
from dshealthd.jobs.ras.status import (
    ANY,
    Communicator,
    RankLocation,
    RasRankState,
    Spread,
    Status,
    Trouble,
)
from dshealthd.jobs.ras.summary import UNCLEAR, RankLabel, lags, troubles

WORLD = 4
PLACE = RankLocation("192.0.2.1", 4003, 3)


def answer(*communicators: Communicator) -> Status:
    """Return an answer of 2.24."""
    return Status(version="2.24.3", communicators=communicators, timeouts=0, processes={})


def test_unclear() -> None:
    """Who is behind is unclear, and by how much is known, once the communicator stands still."""
    world = Communicator(
        name="00ab79b828ff1a75",
        size=WORLD,
        states={RasRankState.RUNNING: WORLD},
        operations={ANY: Spread(8, 11)},
        marks={(ANY, "least"): 8, (ANY, "most"): 11},
        unclear=frozenset({ANY}),
    )
    progress = JobProgress()
    progress.update(answer(world), 1.0)
    assert lags(answer(world), progress, WORLD) == {}
    progress.update(answer(world), 2.0)
    assert lags(answer(world), progress, WORLD) == {(RankLabel(UNCLEAR, "", ""), ANY): 3}


def test_nameless_beside_named() -> None:
    """A missing rank without a name is left out beside one with, and shown where there is none."""
    named = Communicator(name="a", size=WORLD, states={}, troubles=(Trouble(3, "dead", PLACE),))
    nameless = Communicator(name="b", size=2, states={}, troubles=(Trouble(1, "dead", None),))
    other = Communicator(name="c", size=2, states={}, troubles=(Trouble(1, "timeout", None),))
    rank = RankLabel("3", "192.0.2.1", "3")
    assert troubles(answer(named, nameless), WORLD) == [(rank, "dead")]
    assert troubles(answer(named, other), WORLD) == [
        (rank, "dead"),
        (RankLabel("", "", ""), "timeout"),
    ]
    assert troubles(answer(nameless), WORLD) == [(RankLabel("", "", ""), "dead")]
