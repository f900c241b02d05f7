"""Whom the rounds of one investigation implicate, with each number of them on either side."""

from __future__ import annotations

import pytest

from dshealthd.probe.observation import PeerReport, RoundKind
from dshealthd.probe.verdicts.company import Company
from dshealthd.probe.verdicts.explanation import explain
from dshealthd.probe.verdicts.signals import (
    REACH,
    RUN,
    Cause,
    Investigation,
    Measurement,
    ObservedRound,
    Signal,
)

TIMED = Signal("fabric", "nccl", "all_reduce", 1, "0")
SLOW = 2.0
SAME = PeerReport(SLOW)
"""A peer that finds itself as slow as this node is."""
WELL = PeerReport(1.0)
UPLINK = PeerReport(1.0, uplink=True)


def bad(peer: str, told: PeerReport | None = None, ratio: float = SLOW) -> Measurement:
    """Return a slow round with a peer; peers on this node's leaf are n1, n2 and n3."""
    return measured(peer, told, ratio, slow=True)


def good(peer: str, told: PeerReport | None = None) -> Measurement:
    """Return a round that is as usual."""
    return measured(peer, told, 1.0, slow=False)


def measured(peer: str, told: PeerReport | None, ratio: float, *, slow: bool) -> Measurement:
    """Return a round."""
    round = ObservedRound(
        0, 0, 0.0, RoundKind.RAIL, peer, peer.startswith("n"), extra=True, led=True, told=told
    )
    return Measurement(round, ratio, bad=slow, good=not slow, reason="slow")


def cause(
    *rounds: Measurement, near: int = 3, far: int = 3, asked: int = 0, signal: Signal = TIMED
) -> Cause:
    """Return the cause that is found of a signal after so many confirmations were asked for, among
    so many members on the leaf and elsewhere.
    """
    investigation = Investigation((), 0.0, asked=asked)
    investigation.measurements.extend(rounds)
    leaves = {"me": "l"} | {f"n{n}": "l" for n in range(near)} | {f"f{n}": "m" for n in range(far)}
    return explain(investigation, signal, Company("me", leaves, 1.07))


LEAVES = (bad("f1"), bad("f2"), bad("f1"))
"""Three slow rounds out of the leaf, with two peers."""


@pytest.mark.parametrize(
    ("rounds", "near", "far", "found"),
    [
        ((*LEAVES, good("n1", UPLINK), good("n2", WELL)), 3, 3, Cause.LEAF),
        ((*LEAVES[:2], good("n1", UPLINK), good("n2")), 3, 3, Cause.MORE_FAR),
        ((bad("f1"), bad("f1"), bad("f1"), good("n1", UPLINK), good("n2")), 3, 3, Cause.MORE_FAR),
        ((bad("f1"), bad("f1"), bad("f1"), good("n1", UPLINK), good("n2")), 3, 1, Cause.LEAF),
        ((*LEAVES, good("n1", UPLINK)), 3, 3, Cause.MORE_NEAR),
        ((*LEAVES, good("n1", UPLINK)), 1, 3, Cause.LEAF),
        ((*LEAVES, good("n1", SAME), good("n2")), 3, 3, Cause.LEAF),
        ((*LEAVES, good("n1", WELL), good("n2")), 3, 3, Cause.MORE_NEAR),
        ((*LEAVES, bad("f3", UPLINK), bad("f4", WELL), good("n1"), good("n2")), 3, 4, Cause.FABRIC),
        ((*LEAVES, good("f3"), good("n1", UPLINK), good("n2")), 3, 3, Cause.LEAF),
        ((*LEAVES, good("f3"), good("f2"), good("n1"), good("n2")), 3, 3, Cause.NOTHING),
    ],
)
def test_way_out(rounds: tuple[Measurement, ...], near: int, far: int, found: Cause) -> None:
    """Rounds that are slow with two other leaves' members, and not with two of the leaf's, of which
    one has the same trouble, are the leaf's; of one peer alone nothing follows, unless there is no
    other. One good round out of the leaf is chance.
    """
    assert cause(*rounds, near=near, far=far) is found


@pytest.mark.parametrize(("signal", "found"), [(REACH, Cause.NOTHING), (RUN, Cause.MORE_NEAR)])
def test_rounds_that_are_all_a_peers_fault(signal: Signal, found: Cause) -> None:
    """Refusals by peers end the investigation; collectives that fail at a peer go on to others, or
    the link between the two would be named.
    """
    rounds = [bad("f1"), bad("f2")]
    for entry in rounds:
        entry.explained = True
    assert cause(*rounds, signal=signal) is found


@pytest.mark.parametrize(("explained", "found"), [(False, Cause.LEAF), (True, Cause.NOTHING)])
def test_a_round_that_is_a_peers_fault(*, explained: bool, found: Cause) -> None:
    """Where one of those out of the leaf is, they do not tell of its uplink."""
    rounds = [*map(bad, ("f1", "f2", "f3")), good("n1", UPLINK), good("n2")]
    rounds[0].explained = explained
    assert cause(*rounds) is found


BOTH = (bad("n1", SAME), bad("n2", SAME))
INSIDE = (bad("n1", WELL), bad("f1", WELL), bad("n2", WELL))


@pytest.mark.parametrize(
    ("rounds", "found"),
    [
        (INSIDE, Cause.SELF),
        (INSIDE[:2], Cause.MORE_NEAR),
        ((*INSIDE, good("n3")), Cause.SELF),
        ((*INSIDE, good("n3"), good("f2")), Cause.NOTHING),
        ((bad("n1", WELL), bad("n1", WELL), bad("n1", WELL)), Cause.MORE_FAR),
        ((bad("n1"), bad("f1"), bad("n2")), Cause.MORE_NEAR),
        ((bad("n1", WELL), bad("f1", WELL), bad("n1", WELL)), Cause.SELF),
        ((bad("n1", SAME), bad("f1", WELL), bad("n2", WELL)), Cause.SELF),
        ((bad("n1", SAME), bad("f1", WELL), bad("n2", SAME)), Cause.LEAF),
        ((bad("n1", SAME), bad("f1"), bad("n2", SAME)), Cause.MORE_FAR),
        (
            (bad("n1", SAME), bad("n2", SAME), bad("n3", WELL), bad("n4", WELL), bad("f1")),
            Cause.SELF,
        ),
        ((*BOTH, bad("f1", SAME), bad("f2", SAME), bad("f3", WELL), bad("f4", WELL)), Cause.LEAF),
        ((bad("n1", SAME), bad("f1", SAME), bad("n2", SAME)), Cause.MORE_FAR),
        ((bad("n1", SAME), bad("f1", SAME), bad("n2", SAME), bad("f2", SAME)), Cause.FABRIC),
        ((bad("n1", WELL), bad("f1"), bad("n2", WELL, 2.29)), Cause.SELF),
        ((bad("n1", WELL), bad("f1"), bad("n2", WELL, 2.31)), Cause.MORE_FAR),
    ],
)
def test_inside_and_outside(rounds: tuple[Measurement, ...], found: Cause) -> None:
    """Where rounds inside the leaf are slow, too, it is this node if its neighbors are well, the
    leaf if two of them have the same trouble, the fabric if two elsewhere have it. Three rounds
    that are alike will do, four otherwise; one good round is chance.
    """
    assert cause(*rounds) is found


@pytest.mark.parametrize(
    ("rounds", "near", "far", "found"),
    [
        ((bad("f1", SAME), bad("f2", SAME), bad("f1", SAME)), 0, 3, Cause.SELF),
        ((bad("f1", SAME), bad("f2", SAME), bad("f3", SAME)), 0, 3, Cause.FABRIC),
        ((bad("f1"),), 0, 3, Cause.MORE_FAR),
        ((bad("n1"),), 3, 0, Cause.MORE_NEAR),
        ((bad("n1"),), 3, 3, Cause.MORE_FAR),
    ],
)
def test_one_side(rounds: tuple[Measurement, ...], near: int, far: int, found: Cause) -> None:
    """Without a leaf it takes three members that have the same trouble; who is not there is not
    asked.
    """
    assert cause(*rounds, near=near, far=far) is found


@pytest.mark.parametrize(
    ("reasons", "good", "found"),
    [
        ("hung", 0, Cause.MORE_FAR),
        ("hung hung", 0, Cause.SELF),
        ("hung hung", 1, Cause.SELF),
        ("hung hung", 2, Cause.NOTHING),
        ("hung refused", 0, Cause.MORE_FAR),
        ("unreachable hung refused", 0, Cause.MORE_FAR),
        ("hung refused hung hung", 0, Cause.SELF),
        ("hung refused hung hung", 1, Cause.NOTHING),
    ],
)
def test_failures(reasons: str, good: int, found: Cause) -> None:
    """Two failures are proof, and one good round is chance; of those that cut a peer off it takes
    four, and a node that is cut off has no good round.
    """
    rounds = [measured(f"n{turn}", WELL, 1.0, slow=False) for turn in range(good)]
    for turn, reason in enumerate(reasons.split()):
        rounds.append(measured(f"n{turn % 2}", WELL, 1000.0, slow=True))
        rounds[-1].reason = reason
    assert cause(*rounds, signal=RUN) is found


@pytest.mark.parametrize(("bads", "found"), [(14, Cause.NOTHING), (15, Cause.SELF)])
def test_the_last_sixteen_rounds_count(bads: int, found: Cause) -> None:
    """Of two good rounds before, the first is forgotten with the seventeenth."""
    assert cause(good("n3"), good("f2"), *(5 * INSIDE)[:bads]) is found


@pytest.mark.parametrize(
    ("number", "asked", "found"),
    [
        (1, 23, Cause.MORE_FAR),
        (1, 24, Cause.UNCLEAR),
        (11, 0, Cause.MORE_FAR),
        (12, 0, Cause.UNCLEAR),
    ],
)
def test_undecided_in_the_end(number: int, asked: int, found: Cause) -> None:
    """What twelve rounds, or twice as many requests, do not settle is ambiguous."""
    assert cause(*[bad("n1", WELL)] * number, asked=asked) is found


def test_one_elsewhere_is_no_fabric() -> None:
    """It may be faulty itself, and nobody else there can be asked."""
    assert cause(*BOTH, bad("f1", SAME), asked=24) is Cause.LEAF
