"""The same for collectives with gloo and their workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.agents import Scrape
from tests.lab.probe_faults import sabotage
from tests.lab.probing import Probing, begun, named, rounds, suspects
from tests.symptoms.chain import played

pytestmark = pytest.mark.lab  # see test_probes.py

OPERATION = "dshealthd_probe_operation_seconds"
DISAGREES = "dshealthd_probe_peer_disagrees"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probing]:
    """Four nodes whose rounds are collectives with gloo.

    A round takes nearly a second on two cores, and one and a half beside other work: an epoch must
    have room for a confirmation too, which waits until others have ended theirs. One that hangs
    takes nearly nine: in three whole epochs, after which each pair meets again, its node would meet
    the same one time and again.
    """
    with Probing(tmp_path_factory.mktemp("full"), 4, period=3.5) as lab:
        yield begun(lab)


def test_smoke(full: Probing) -> None:
    """Rounds between four nodes go well, are timed for each size, and accuse nobody."""
    sizes = {"8", "1024", "65536"}

    def are_timed(scrapes: Mapping[str, Scrape]) -> bool:
        return len(scrapes) == len(full.nodes) and all(
            rounds(scrape, kind="pair", outcome="ok") >= 6
            and all(
                scrape.value(OPERATION, kind="pair", backend="gloo", size=size) for size in sizes
            )
            for scrape in scrapes.values()
        )

    found = full.await_(are_timed, 66, "six good rounds of pairs, timed for each size")
    told = full.told(found)
    for scrape in found.values():
        assert not suspects(scrape), told
        assert scrape.value("dshealthd_members") == 4
        assert scrape.value("dshealthd_probe_up") == 1
    assert len({scrape.value("dshealthd_members_hash") for scrape in found.values()}) == 1


def test_wrong_data(full: Probing) -> None:
    """A node whose worker contributes wrong data is named as corrupting it."""
    _, two, *_ = full.nodes
    named(
        full,
        sabotage(two, "collective:3:bad_input"),
        two,
        {"corrupted"},
        by=(two,),
        epochs=15,
        wrong=4,
    )


def test_wrong_torch(full: Probing) -> None:
    """A node with another version of torch is told of by each of the others, and by itself of each;
    its rounds are declined, and it is no suspect.
    """
    _, two, *_ = full.nodes
    pairs = {(one.name, two.name) for one in full.nodes if one is not two}
    pairs |= {(peer, own) for own, peer in pairs}

    def differ(scrapes: Mapping[str, Scrape]) -> set[tuple[str, str]]:
        return {
            (own, dict(labels)["peer"])
            for own, scrape in scrapes.items()
            for labels, value in scrape.series.get(DISAGREES, {}).items()
            if value and dict(labels)["reason"] == "versions_differ"
        }

    with sabotage(two, "versions"):
        found = full.await_(lambda found: differ(found) == pairs, 25, "versions that differ")
    assert not any(map(suspects, found.values())), full.told(found)
    full.await_(lambda found: not differ(found), 25, "versions that are the same")


def test_worker_killed_in_rendezvous(full: Probing) -> None:
    """A node whose workers are killed while they meet the others is named, and nobody who waits for
    them.
    """
    _, two, *_ = full.nodes
    named(full, sabotage(two, "stage:init:kill"), two, {"failed"}, by=(two,), epochs=25)


@pytest.mark.timeout(160)
def test_worker_stopped_in_a_collective(full: Probing, tmp_path: Path) -> None:
    """A node whose workers stop in a collective is named as hanging, after as many deadlines as it
    takes, and nobody who waits for them; it pages.
    """
    _, two, *_ = full.nodes
    told = named(
        full,
        sabotage(two, "collective:3:stop"),
        two,
        {"hung"},
        by=(two,),
        epochs=70,
        clear=20,
        wrong=4,
    )
    assert played("DshealthdProbeFails", told, tmp_path) == (False, True)
