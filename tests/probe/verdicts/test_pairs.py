"""Pairs with which rounds go badly, and the company of others by which they are judged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dshealthd.core.schema import SchemaError
from dshealthd.probe.observation import HARD, PeerReport, RoundKind
from dshealthd.probe.options import BaselineOptions
from dshealthd.probe.peers.messages import REPORT
from dshealthd.probe.verdicts.baseline import Baselines
from dshealthd.probe.verdicts.company import Company, Met
from dshealthd.probe.verdicts.detector import Detector
from dshealthd.probe.verdicts.pairs import PairSuspicion, PairVerdict
from dshealthd.probe.verdicts.signals import REACH, RUN, Investigation, ObservedRound, Signal

ECHO = Signal("light", "agent", "echo", 0, "")
TIMED = Signal("fabric", "nccl", "all_reduce", 1, "0")
NAMES = ("me", "peer", "a", "b", "c", "d", "e")
HIGH = 1.07
GOOD = frozenset[Signal]()
WELL = PeerReport(node=1.0, pairs={"a": 1.0, "b": 1.0})


def a_round(
    number: int, peer: str = "peer", epoch: int = 0, told: PeerReport | None = None
) -> ObservedRound:
    """Return a round that this node led."""
    at, kind, near = 10.0 * epoch, RoundKind.LIGHT, False
    return ObservedRound(number, epoch, at, kind, peer, near, extra=False, led=True, told=told)


def company(names: tuple[str, ...] = NAMES) -> Company:
    """Return members whose leaves are not known."""
    return Company("me", dict.fromkeys(names, ""), HIGH)


def met(
    known: Company, peer: str, ratio: float, number: int = 10, epoch: int = 1, *, light: bool = True
) -> None:
    """Record a round with another member, bad if it took longer than usual."""
    round, bad = a_round(number, peer, epoch), frozenset({ECHO}) if ratio > HIGH else GOOD
    known.log.append(Met(round, light=light, ratio=ratio, bad=bad, silent=ratio >= HARD))


def suspicion(signal: Signal, bads: int, ratio: float = HARD) -> PairSuspicion:
    """Return the suspicion of a peer with which so many rounds were bad."""
    pair = PairSuspicion.begin(a_round(0), frozenset({signal}), ratio, "bad", None)
    for number in range(1, bads):
        pair.update(a_round(number), frozenset({signal}), ratio, "bad", {signal: False})
    return pair


@pytest.mark.parametrize(
    ("signal", "goods", "earlier", "needed"),
    [(REACH, 0, 0, 5), (REACH, 1, 0, 8), (REACH, 0, 1, 7), (RUN, 0, 1, 2), (ECHO, 0, 1, 6)],
)
def test_bad_rounds_that_a_link_takes(
    signal: Signal, goods: int, earlier: int, needed: int
) -> None:
    """A cut link takes five failed calls, eight if good ones came between, with those before them;
    a hung one two rounds, and a slow one two more than a node takes.
    """
    for bads, enough in ((needed - 1, False), (needed, True)):
        pair = suspicion(signal, bads)
        pair.goods, pair.earlier = goods, earlier
        assert (pair.missing <= 0) is enough


@pytest.mark.parametrize(("bads", "needed"), [(1, 1), (2, 2)])
def test_good_rounds_that_end_a_suspicion(bads: int, needed: int) -> None:
    """One good round refutes a single bad one, two refute more; what measures other things does
    not count.
    """
    pair = suspicion(ECHO, bads)
    assert not pair.update(a_round(50), frozenset(), 1.0, "", {REACH: True})
    for number in range(1, needed + 1):
        ended = pair.update(a_round(50 + number), frozenset(), 1.0, "", {ECHO: True})
        assert ended is (number == needed)


@pytest.mark.parametrize(
    ("signal", "led_first", "led", "ended"),
    [
        (REACH, True, True, True),
        (REACH, True, False, False),
        (REACH, False, False, True),
        (ECHO, True, False, True),
    ],
)
def test_a_peer_that_calls(signal: Signal, *, led_first: bool, led: bool, ended: bool) -> None:
    """It is not one that can be called: that this node did not reach it stands. What goes wrong in
    its round counts.
    """
    pair = suspicion(signal, 1)
    pair.first = replace(pair.first, led=led_first)
    again = replace(a_round(1), led=led)
    assert pair.update(again, frozenset(), 1.0, "", {signal: True}) is ended
    pair.update(again, frozenset({RUN}), HARD, "hung", {RUN: False})
    assert pair.signals == {RUN}


def test_who_answered_last_is_reached() -> None:
    """Though the suspicion goes on, others may meet it."""
    pair = suspicion(REACH, 3)
    assert pair.unreached
    assert not pair.update(a_round(9), frozenset(), 1.0, "", {REACH: True})
    assert not pair.unreached


def test_a_suspicion_without_rounds_lapses() -> None:
    """It does after six epochs, and what was bad before counts for thirty-six."""
    pair = suspicion(REACH, 3)
    assert not pair.is_stale(6)
    assert pair.is_stale(7)
    for epoch, earlier in ((36, 3), (37, 0)):
        begun = a_round(100, epoch=epoch)
        again = PairSuspicion.begin(begun, frozenset({REACH}), HARD, "bad", pair)
        assert again.earlier == earlier
    pair.accused = "unreachable"
    assert not pair.is_stale(7), "an accusation takes good rounds to end"


@pytest.mark.parametrize(("ratio", "ill"), [(2.5, 0), (2.6, 1)])
def test_what_is_bad_with_others_explains_only_what_is_alike(ratio: float, ill: int) -> None:
    """A round with another that is bad, but four times less so, does not explain the pair's."""
    known = company()
    met(known, "a", ratio)
    assert suspicion(ECHO, 6, 10.0).others(known).ill == ill


@pytest.mark.parametrize(
    ("number", "peer", "light", "near", "counts"),
    [
        (1, "a", False, False, (1, 1)),
        (0, "a", False, False, (0, 0)),  # as old as the first bad one of the pair
        (1, "peer", False, False, (0, 0)),
        (0, "a", True, False, (0, 0)),
        (1, "peer", True, False, (0, 0)),
        (1, "a", True, False, (0, 1)),  # an echo, which says nothing good of collectives
        (1, "a", False, True, (0, 1)),  # inside the leaf, which says nothing of its uplink
    ],
)
def test_which_rounds_with_others_count(
    number: int, peer: str, counts: tuple[int, int], *, light: bool, near: bool
) -> None:
    """Those since the first bad one, with others, of the same kind and the same side of the leaf;
    echoes since then tell after a collective that hung.
    """
    known = company()
    round = replace(a_round(number, peer, 1), near=near)
    known.log.append(Met(round, light=light, ratio=1.0, bad=GOOD, silent=False))
    first = replace(a_round(0), kind=RoundKind.RAIL)
    pair = PairSuspicion.begin(first, frozenset({TIMED}), 10.0, "slow", None)
    others = pair.others(known)
    assert (others.well, others.good) == counts
    assert pair.echoes(known) == ({"a": False} if light and others.good else {})
    assert pair.met(known) == ({} if light else {"a": others.good} if others.good else {})


@pytest.mark.parametrize(("accused", "well", "over"), [("", 0, 1), ("slow", 0, 0), ("slow", 1, 1)])
def test_what_ends_an_accusation(accused: str, *, well: int, over: int) -> None:
    """A round that is not bad refutes a suspicion; an accusation takes one that is well."""
    pair = suspicion(ECHO, 1, 10.0)
    pair.accused = accused
    assert pair.update(a_round(1), frozenset(), 1.0, "", {ECHO: bool(well)}) is bool(over)


@pytest.mark.parametrize(("accused", "ended"), [("", [0, 0, 1]), ("slow", [0, 0, 0, 1])])
def test_good_rounds_that_end_an_accusation_are_in_a_row(accused: str, ended: list[int]) -> None:
    """Those that end a suspicion are not: chance mixes in bad ones."""
    pair = suspicion(ECHO, 6, 10.0)
    pair.accused = accused
    rounds = [GOOD, frozenset({ECHO}), GOOD, GOOD][: len(ended)]
    assert ended == [pair.update(a_round(7), bad, 10.0, "slow", {ECHO: not bad}) for bad in rounds]


@pytest.mark.parametrize(
    ("signal", "bads", "epoch", "ambiguous"),
    [
        (REACH, 12, 12, 0),
        (REACH, 11, 13, 0),
        (REACH, 12, 13, 1),
        (ECHO, 6, 12, 0),
        (ECHO, 5, 13, 0),
        (ECHO, 6, 13, 1),
    ],
)
def test_a_pair_is_ambiguous_in_the_end(
    signal: Signal, bads: int, epoch: int, *, ambiguous: int
) -> None:
    """If the peer does not say how it is with others, the pair is ambiguous after twelve epochs,
    and as many failed calls, or as many slow rounds as a link needs.
    """
    found = suspicion(signal, bads, 10.0).find(company(), set(), epoch)
    assert found is (PairVerdict.AMBIGUOUS if ambiguous else PairVerdict.NOTHING)


@pytest.mark.parametrize(
    ("mine", "theirs", "link"),
    [
        ({"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 1.0}, True),
        ({"a": 1.0, "b": 1.0}, None, False),
        ({"a": 1.0}, {"a": 1.0, "b": 1.0}, False),  # a single one may be wrong
        ({"a": 1.0, "b": 1.0}, {"a": 1.0}, False),
        ({"a": 1.0, "b": 1.0, "c": 9.0}, {"a": 1.0, "b": 1.0, "c": 9.0}, True),
        ({"a": 1.0, "b": 1.0, "c": 9.0, "d": 9.0}, {"a": 1.0, "b": 1.0}, False),
        ({"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 1.0, "c": 9.0, "d": 9.0}, False),
    ],
)
def test_a_link_has_two_ends_that_are_well(
    mine: dict[str, float], theirs: dict[str, float] | None, *, link: bool
) -> None:
    """A slow link is one whose ends are each well with at least two others, and with most."""
    known = company()
    for name, ratio in mine.items():
        met(known, name, ratio)
    if theirs is not None:
        known.record_report(a_round(20, told=PeerReport(node=1.0, pairs=theirs)))
    found = suspicion(ECHO, 6, 10.0).find(known, set(), 1)
    assert found is (PairVerdict.LINK if link else PairVerdict.NOTHING)
    assert suspicion(ECHO, 5, 10.0).find(known, set(), 1) is PairVerdict.NOTHING, "too early"


@pytest.mark.parametrize(
    ("investigated", "accused"), [((), "slow"), ((ECHO,), ""), ((TIMED,), ""), ((RUN,), "slow")]
)
def test_this_node_s_own_fault_comes_first(investigated: tuple[Signal, ...], accused: str) -> None:
    """While one of the signals of a pair is investigated on this node, no link is accused."""
    judge = Detector("me", dict.fromkeys(NAMES, ""), Baselines(BaselineOptions()), lambda: 0.0)
    for name in ("a", "b"):
        met(judge._company, name, 1.0)
    judge._company.record_report(a_round(20, told=WELL))
    for signal in investigated:
        judge._of(signal).investigation = Investigation((), 0.0)
    pair = replace(suspicion(ECHO, 6, 10.0), signals=frozenset({ECHO, TIMED}), reason="slow")
    judge._epoch = 1
    judge._judge(pair)
    assert pair.accused == accused


@pytest.mark.parametrize(
    ("bads", "echoes", "found"),
    [
        (1, [], PairVerdict.NOTHING),
        (2, [], PairVerdict.LINK),
        (2, [HARD], PairVerdict.LINK),
        (1, [HARD, HARD], PairVerdict.SELF),
        (2, [HARD, 1.0], PairVerdict.LINK),
    ],
)
def test_collectives_that_hang(bads: int, echoes: list[float], found: PairVerdict) -> None:
    """Two that hang between ends that are well with others are the link's. If meanwhile no echo
    with two others comes back, it is this node's.
    """
    known = company()
    for peer in "ab":
        round = replace(a_round(10, peer, 1), kind=RoundKind.PAIR)
        known.log.append(Met(round, light=False, ratio=1.0, bad=GOOD, silent=False))
    for peer, ratio in zip("cd", echoes, strict=False):
        met(known, peer, ratio)
    known.record_report(a_round(20, told=WELL))
    pair = suspicion(RUN, bads)
    pair.first = replace(pair.first, kind=RoundKind.PAIR)
    assert pair.find(known, set(), 1) is found


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([], PairVerdict.NOTHING),
        ([False], PairVerdict.NOTHING),  # a single peer's word accuses nobody
        ([False, False], PairVerdict.PEER),
        ([False, True], PairVerdict.NOTHING),
        ([True, True], PairVerdict.LINK),
    ],
)
def test_whom_nobody_reaches(words: list[bool], found: PairVerdict) -> None:
    """Two others are asked to call a peer that this node cannot call."""
    known, pair = company(), suspicion(REACH, 5)
    for name in ("a", "b"):
        met(known, name, 1.0)
    known.record_report(a_round(20, told=WELL))
    pair.words = {name: (1, well) for name, well in zip(("a", "b"), words, strict=False)}
    assert pair.find(known, {"peer"}, 1) is found
    first = pair.find(known, {"peer"}, 0)
    assert first is PairVerdict.NOTHING, (
        "in its first epoch others may know what was before the fault"
    )
    pair.is_good = True
    assert pair.find(known, {"peer"}, 1) is not PairVerdict.LINK, "the last call came through"


@pytest.mark.parametrize(("well", "link"), [(3, False), (4, True)])
def test_who_loses_packets_blames_no_link(well: int, *, link: bool) -> None:
    """A node that fails with another, too, needs four good rounds for each bad one."""
    known, pair = company(), suspicion(REACH, 5)
    met(known, "c", HARD)
    for number in range(well):
        met(known, "ab"[number % 2], 1.0, 11 + number)
    known.record_report(a_round(20, told=WELL))
    pair.words = {"a": (1, True), "b": (1, True)}
    found = pair.find(known, {"peer"}, 1)
    assert found is (PairVerdict.LINK if link else PairVerdict.NOTHING)


@pytest.mark.parametrize(
    ("names", "peers", "span", "later", "intermittent"),
    [
        (NAMES, "abc", 3, 0, True),
        (NAMES, "ab", 3, 0, False),  # two
        (NAMES, "aba", 3, 0, False),  # two peers may be faulty at once
        (NAMES[:6], "aba", 3, 0, False),
        (NAMES[:5], "aba", 3, 0, True),  # unless there are few
        (NAMES[:5], "aaa", 3, 0, False),
        (NAMES, "abc", 4, 0, False),  # too long for lost packets
        (NAMES, "abc", 1, 14, True),
        (NAMES, "abc", 1, 15, False),  # the first is forgotten
    ],
)
def test_short_outages(
    names: tuple[str, ...], peers: str, span: int, later: int, *, intermittent: bool
) -> None:
    """Three outages of at most three epochs within sixteen, with several peers, are this node's."""
    known, epoch = company(names), 0
    for number, peer in enumerate(peers):
        met(known, peer, HARD, 2 * number, epoch)
        met(known, peer, 1.0, 2 * number + 1, epoch + span)
        epoch += span
    assert known.is_intermittent(epoch + later) is intermittent


def test_who_declines_is_not_asked() -> None:
    """A member that declined is left alone for twenty seconds, one in another round for two."""
    known = company()
    for busy, seconds in ((False, 20.0), (True, 2.0)):
        known.rest("a", 100.0, busy=busy)
        assert known.rests("a", 99.9 + seconds)
        assert not known.rests("a", 100.0 + seconds)


def test_what_is_told_of_pairs() -> None:
    """The last six pairs of two epochs are told; a failed round is not undone by a good one."""
    known = company()
    met(known, "a", 9.0, 1, 1)
    met(known, "b", HARD, 2, 2)
    met(known, "b", 1.0, 3, 3)
    met(known, "c", 9.0, 4, 3)
    met(known, "c", 1.0, 5, 3)
    assert known.told(3) == ({"b": HARD, "c": 1.0}, ("b", "c"))


def test_echoes_are_told_as_such() -> None:
    """A good one does not undo a slow collective, and one that fails does not hide behind a good
    collective.
    """
    known = company()
    met(known, "a", 9.0, 1, light=False)
    met(known, "a", 1.0, 2)
    met(known, "b", 1.0, 3, light=False)
    met(known, "b", HARD, 4)
    met(known, "c", HARD, 5)
    met(known, "c", 1.0, 6, light=False)
    met(known, "d", 1.0, 7)
    met(known, "e", 9.0, 8, light=False)
    met(known, "e", 1.0, 9, light=False)
    assert known.told(1) == ({"a": 9.0, "b": HARD, "c": HARD, "d": 1.0, "e": 1.0}, ("d",))


@pytest.mark.parametrize(
    ("signal", "ratio", "bads"),
    [(RUN, HARD, 2), (TIMED, 10.0, 6), (REACH, HARD, 5), (ECHO, 10.0, 6)],
)
@pytest.mark.parametrize("echoes", [(), ("a",)])
def test_echoes_of_the_peer_say_nothing_good_of_collectives(
    signal: Signal, ratio: float, bads: int, echoes: tuple[str, ...]
) -> None:
    """A peer whose collectives go wrong with everybody still echoes: its link is not accused before
    it has met two others in collectives.
    """
    known, pair = company(), suspicion(signal, bads, ratio)
    if signal in {RUN, TIMED}:
        pair.first, pair.agreed = replace(pair.first, kind=RoundKind.PAIR), 2
    for name in ("a", "b", "c", "d"):
        met(known, name, 1.0, light=False)
    known.record_report(a_round(20, told=replace(WELL, echoes=echoes)))
    pair.words = {"a": (1, True), "b": (1, True)}
    unknown = signal in {RUN, TIMED} and echoes
    assert pair.find(known, set(), 1) is (PairVerdict.NOTHING if unknown else PairVerdict.LINK)


@pytest.mark.parametrize(("bads", "found"), [(1, PairVerdict.NOTHING), (2, PairVerdict.AMBIGUOUS)])
def test_two_nodes_alone(bads: int, found: PairVerdict) -> None:
    """One lost echo is no fault; of a second, nobody can tell whose it is."""
    assert suspicion(REACH, bads).find(company(NAMES[:2]), set(), 1) is found


def test_slow_rounds_of_a_peer_say_nothing_of_a_hang() -> None:
    """It is well with others as long as rounds with them do not fail, too."""
    known, pair = company(), suspicion(TIMED, 1, 2.0)
    pair.update(a_round(1), frozenset({RUN}), HARD, "hung", {RUN: False})
    known.record_report(a_round(20, told=PeerReport(node=1.0, pairs={"a": 1.3, "b": HARD})))
    assert pair.theirs(known)[:2] == (1, 1)


@pytest.mark.parametrize(("agreed", "link"), [(1, False), (2, True)])
def test_a_slow_link_is_slow_for_both_of_its_ends(agreed: int, *, link: bool) -> None:
    """Twice the peer has to report that it finds its rounds with this node slow."""
    known, pair = company(), suspicion(TIMED, 6, 10.0)
    pair.first, pair.agreed = replace(pair.first, kind=RoundKind.PAIR), agreed
    for name in ("a", "b"):
        met(known, name, 1.0, light=False)
    known.record_report(a_round(20, told=WELL))
    assert pair.find(known, set(), 1) is (PairVerdict.LINK if link else PairVerdict.NOTHING)


@pytest.mark.parametrize(
    ("ratios", "signal", "light", "many"),
    [
        ((11.5, 8.7), TIMED, False, True),
        ((11.6, 8.7), TIMED, False, False),
        ((11.5, 8.6), TIMED, False, False),
        ((10.0,), TIMED, False, False),
        ((10.0, 10.0), RUN, False, False),
        ((10.0, 10.0), TIMED, True, False),
    ],
)
def test_pairs_that_are_slow_alike(
    ratios: tuple[float, ...], signal: Signal, *, light: bool, many: bool
) -> None:
    """Two others with which rounds of the kind are as slow, by 15 %, in all that is."""
    known, pair = company(), suspicion(TIMED, 6, 10.0)
    pair.first = replace(pair.first, kind=RoundKind.PAIR)
    for name, ratio in zip("ab", ratios, strict=False):
        bad = frozenset({signal})
        known.log.append(Met(a_round(1, name, 1), light, ratio, bad, silent=False))
    assert pair.is_one_of_many(known) is many


@pytest.mark.parametrize(
    ("kind", "echoes", "opinion"),
    [(RoundKind.PAIR, (), 1.5), (RoundKind.PAIR, ("me",), None), (RoundKind.LIGHT, (), None)],
)
def test_opinion_of_the_peer(
    kind: RoundKind, echoes: tuple[str, ...], opinion: float | None
) -> None:
    """What it reports of its collectives with this node; nothing of echoes."""
    pair = suspicion(TIMED, 1, 2.0)
    pair.first = replace(pair.first, kind=kind)
    assert pair.opinion(PeerReport(pairs={"me": 1.5}, echoes=echoes), "me") == opinion


def test_what_is_kept_does_not_grow_with_the_fleet() -> None:
    """Among 10,000 members, a node forgets who has rested, and chooses among a few members on
    either side of its leaf, but among all of a small fleet.
    """
    leaves = {f"n{number:05}": f"leaf-{number // 32:03}" for number in range(10_000)}
    known = Company("n00000", leaves, HIGH)
    assert (known.intra_leaf, known.inter_leaf) == (31, 9968)
    for epoch, name in enumerate(leaves):
        known.rest(name, 10.0 * epoch)
    assert len(known._rests) <= 3
    chosen = {known.choose(near=None, asked={}, ill=set(), now=1e6) for _ in range(3)}
    assert chosen < leaves.keys()
    assert len(known._choice) == 31 + 64
    assert sorted(company()._choice) == sorted(set(company().leaves) - {company().me})


def test_a_report_is_as_long_as_peers_read() -> None:
    """Of the rounds of two epochs with all members it has the newest; one more would be refused."""
    known = company()
    for number, peer in enumerate((*NAMES[1:], "peer", "f")):
        met(known, peer, 1.0 + number / 100, number)
    pairs, echoes = known.told(1)
    assert echoes == tuple(pairs)
    assert list(pairs) == ["b", "c", "d", "e", "peer", "f"]
    report = PeerReport(pairs=pairs, echoes=echoes)
    assert REPORT.read(REPORT.write(report, "report"), "report") == report
    with pytest.raises(SchemaError, match="pairs"):
        REPORT.write(PeerReport(pairs=pairs | {"a": 1.0}), "report")
