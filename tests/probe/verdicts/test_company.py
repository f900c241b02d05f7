"""What a node remembers of the others, with each number on either side."""

from __future__ import annotations

import pytest

from dshealthd.probe.observation import HARD, PeerReport, RoundKind
from dshealthd.probe.verdicts.company import Company, Met
from dshealthd.probe.verdicts.signals import REACH, ObservedRound, Signal

HIGH = 1.07


def company(near: int = 3, far: int = 3) -> Company:
    """Return so many members on the leaf of this node and elsewhere."""
    leaves = {"me": "l"} | {f"n{n}": "l" for n in range(near)} | {f"f{n}": "m" for n in range(far)}
    return Company("me", leaves, HIGH)


def met(
    peer: str,
    number: int = 0,
    epoch: int = 0,
    at: float = 0.0,
    told: PeerReport | None = None,
    **how: bool | float,
) -> Met:
    """Return a round with a peer, which was good unless it was `bad` or `silent`."""
    kind, near = RoundKind.PAIR, peer.startswith("n")
    round = ObservedRound(number, epoch, at, kind, peer, near, extra=False, led=True, told=told)
    silent = bool(how.get("silent"))
    bad = frozenset({REACH}) if how.get("bad", silent) else frozenset[Signal]()
    return Met(round, light=False, ratio=how.get("ratio", 1.0), bad=bad, silent=silent)


def chosen(known: Company, now: float = 0.0, *, near: bool | None = None, **more: object) -> str:
    """Return the member that is asked next."""
    asked, ill = more.get("asked", {}), more.get("ill", ())
    return known.choose(near=near, asked=asked, ill=ill, now=now) or ""  # type: ignore[arg-type]


@pytest.mark.parametrize("well", ["n0", "n1", "n2"])
def test_who_was_well_is_asked_first(well: str) -> None:
    """For a minute after a good round; not before one that was asked less often."""
    known = company(far=0)
    first = chosen(known)
    others = {name for name in ("n0", "n1", "n2") if name != well}
    known.log.append(met(well, at=100.0))
    known.log.extend(met(name, at=100.0, bad=True) for name in others)
    assert chosen(known, 159.9) == well
    assert chosen(known, 160.0) == first
    assert chosen(known, 100.0, asked={well: 1}) in others
    assert chosen(known, 100.0, ill=[well]) in others
    known.rest(well, 100.0)
    assert chosen(known, 110.0) in others


def test_the_side_that_is_asked() -> None:
    """Near or far as wanted; nobody where there is nobody."""
    known = company()
    assert chosen(known, near=True).startswith("n")
    assert chosen(known, near=False).startswith("f")
    assert chosen(company(far=0), near=False) == ""
    assert not Company("me", {"me": "", "a": ""}, HIGH).near("a")


def test_nodes_ask_different_members_first() -> None:
    """If many become suspicious at once, no member has to answer all of them."""
    leaves = {f"n{number}": "l" for number in range(9)}
    assert len({chosen(Company(name, leaves, HIGH)) for name in leaves}) > 4


def outages(*peers: str) -> list[Met]:
    """Return rounds in which each peer in turn is silent, and answers in the next epoch."""
    rounds = []
    for turn, peer in enumerate(peers):
        rounds.append(met(peer, 2 * turn, 5 * turn, silent=True))
        rounds.append(met(peer, 2 * turn + 1, 5 * turn + 1))
    return rounds


ABC = ("n0", "n1", "f0")


def test_outages_at_once_are_one() -> None:
    """This node was cut off for a moment, or all were started anew."""
    known = company()
    known.log.extend(met(peer, number, 0, silent=True) for number, peer in enumerate(ABC))
    known.log.extend(met(peer, number + 3, 1) for number, peer in enumerate(ABC))
    assert not known.is_intermittent(1)


@pytest.mark.parametrize(("score", "found"), [(HARD, False), (HARD - 0.1, True), (None, True)])
def test_who_blames_itself_counts_for_nothing(score: float | None, *, found: bool) -> None:
    """Of three outages, two are this node's then."""
    known = company()
    known.log.extend(outages(*ABC))
    known.record_report(met("n1", 9, told=PeerReport(score)).round)
    assert known.is_intermittent(11) is found


@pytest.mark.parametrize(
    ("report", "epoch", "fails"),
    [
        (PeerReport(HARD), 16, True),
        (PeerReport(HARD), 17, False),
        (PeerReport(HARD), -1, False),
        (PeerReport(HARD - 0.1), 0, False),
        (PeerReport(None, pairs={"f1": HARD}), 0, True),
        (PeerReport(None, pairs={"f1": HARD - 0.1}), 0, False),
        (PeerReport(None, pairs={"me": HARD}), 0, False),
    ],
)
def test_a_peer_that_fails_with_others(report: PeerReport, epoch: int, *, fails: bool) -> None:
    """By a report of the last sixteen epochs, of itself or of others than this node."""
    known = company()
    known.record_report(met("n1", told=report).round)
    assert known.fails_with_others("n1", epoch) is fails
    assert not known.fails_with_others("n2", epoch)


def test_sixty_four_rounds_and_reports_are_remembered() -> None:
    """More than those of sixteen epochs."""
    known = company(70, 0)
    for number in range(65):
        known.log.append(met(f"n{number}", number))
        known.record_report(met(f"n{number}", number, told=PeerReport(1.0)).round)
    assert len(known.log) == 64
    assert known.report("n0") is None
    assert known.report("n1") == PeerReport(1.0)
    assert known.report("n64", since=63) == PeerReport(1.0)
    assert known.report("n64", since=64) is None


def test_who_is_gone_is_forgotten() -> None:
    """Failed rounds with a peer that nobody reaches say nothing, as all with a removed one."""
    known = company()
    known.log.extend([met("n0", 0), met("n0", 1, bad=True), met("n1", 2, bad=True)])
    known.record_gone("n0")
    assert [entry.round.number for entry in known.log] == [0, 2]
    known.apply_members({"me": "l", "n1": "l"})
    assert [entry.round.number for entry in known.log] == [2]


def test_ratios_of_a_peer_with_others() -> None:
    """Not with this node; of one on another leaf, not those inside that leaf."""
    known = company()
    report = PeerReport(1.0, pairs={"me": 9.0, "n0": 2.0, "f1": 3.0})
    assert known.pairs_of("n1", report) == {"n0": 2.0, "f1": 3.0}
    assert known.pairs_of("f0", report) == {"n0": 2.0}
