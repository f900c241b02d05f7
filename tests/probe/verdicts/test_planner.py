"""Which extra round comes next."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest

from dshealthd.probe.observation import HARD, RoundKind
from dshealthd.probe.verdicts.company import Company
from dshealthd.probe.verdicts.pairs import PairSuspicion
from dshealthd.probe.verdicts.planner import PlanningInput, early, plan
from dshealthd.probe.verdicts.signals import REACH, Investigation, Signal, SignalHistory
from tests.probe.verdicts.test_explanation import bad
from tests.probe.verdicts.test_pairs import ECHO, TIMED, company, met, suspicion


def planned(
    known: Company, pair: PairSuspicion, epoch: int = 6, unreached: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the members of the extra round that a suspicion of a pair needs next."""
    state = PlanningInput(known, {}, {"peer": pair}, {}, unreached, epoch=epoch, now=0.0)
    step = next(plan(state), None)
    return step.confirmation.members if step else ()


@pytest.mark.parametrize(
    ("sought", "checked", "itself"), [(5, 5, False), (6, 5, True), (6, 6, False)]
)
def test_call_of_an_unreached_peer(sought: int, checked: int, *, itself: bool) -> None:
    """Another one is asked to call it, unless who was asked last has not answered: then this node
    does, once in an epoch.
    """
    pair = suspicion(REACH, 3)
    pair.words, pair.sought = {"a": (5, True), "b": (4, True)}, sought
    pair.checked = checked
    caller, called = planned(company(), pair)
    assert (caller == "me", called) == (itself, "peer")


@pytest.mark.parametrize(
    ("bads", "reached", "again"), [(4, True, True), (4, False, False), (5, True, False)]
)
def test_calls_of_an_epoch_until_the_link_is_known(
    bads: int, *, reached: bool, again: bool
) -> None:
    """Once others have all said that they reach it, until enough calls have failed."""
    pair = suspicion(REACH, bads)
    pair.words, pair.checked = {"a": (6, True), "b": (6, reached)}, 6
    known = company()
    met(known, "c", 1.0)
    assert planned(known, pair) == (("me", "peer") if again else ())


@pytest.mark.parametrize(("bads", "again"), [(1, True), (2, False)])
def test_a_lost_echo_is_repeated_at_once(bads: int, *, again: bool) -> None:
    """Once; then the next epoch shows whether it was chance."""
    assert planned(company(), suspicion(REACH, bads), 0) == (("me", "peer") if again else ())


@pytest.mark.parametrize(
    ("signal", "ill", "expected"),
    [(ECHO, 2, "me"), (ECHO, 3, ""), (REACH, 2, "another"), (REACH, 3, "me")],
)
def test_a_pair_of_a_node_that_is_ill_with_others(signal: Signal, ill: int, expected: str) -> None:
    """From three bad rounds with others on, nobody else is asked about the pair, and a slow one
    runs no more.
    """
    known, ratio = company(), HARD if signal == REACH else 10.0
    for number, name in enumerate("abcde"):
        met(known, name, ratio if number < ill else 1.0)
    caller = (*planned(known, suspicion(signal, 3, ratio)), "")[0]
    assert (caller if caller in {"me", ""} else "another") == expected


@pytest.mark.parametrize(
    ("declined", "unreached", "again"),
    [(-1e6, (), True), (0.0, (), False), (-1e6, ("a",), True), (-1e6, ("peer",), False)],
)
def test_a_slow_peer_that_cannot_be_asked(
    declined: float, unreached: tuple[str, ...], *, again: bool
) -> None:
    """No more rounds about one that has declined and still rests, or that cannot be reached."""
    known = company()
    met(known, "b", 1.0)
    known.rest("peer", declined)
    assert bool(planned(known, suspicion(ECHO, 3, 10.0), unreached=unreached)) is again


@pytest.mark.parametrize(
    ("bads", "others", "checked", "expected"),
    [
        (3, "a", 5, RoundKind.PAIR),
        (3, "aa", 5, RoundKind.PAIR),
        (3, "ab", 5, RoundKind.PAIR),
        (6, "ab", 5, RoundKind.LIGHT),
        (6, "ab", 6, None),
    ],
)
def test_what_a_slow_pair_needs(
    bads: int, others: str, checked: int, expected: RoundKind | None
) -> None:
    """First this node has to be well with two others, as the peer counts them; then the pair has to
    be slow often enough; and then the peer has to say how it is with others: an echo does for that,
    while rounds of the pair would keep both from meeting others.
    """
    known, pair = company(), suspicion(TIMED, bads, 10.0)
    pair.first, pair.checked = replace(pair.first, kind=RoundKind.PAIR), checked
    for name in others:
        met(known, name, 1.0, light=False)
    state = PlanningInput(known, {}, {"peer": pair}, {}, (), epoch=6, now=0.0)
    steps = [step.confirmation for step in plan(state)]
    assert [step.kind for step in steps] == ([] if expected is None else [expected])
    well = len(set(others)) > 1
    assert all((step.members == ("me", "peer")) is well for step in steps)
    assert not any(step.members[1] in others for step in steps)


@pytest.mark.parametrize("accused", ["", "slow"])
@pytest.mark.parametrize(("declined", "again"), [(-20.0, True), (-19.0, False)])
@pytest.mark.parametrize(("signal", "epoch"), [(REACH, 0), (REACH, 6), (ECHO, 6)])
def test_who_has_declined_rests(
    signal: Signal, epoch: int, accused: str, declined: float, *, again: bool
) -> None:
    """For twenty seconds, whatever is known of the pair."""
    known, pair = company(), suspicion(signal, 1)
    met(known, "b", 1.0)
    pair.accused, pair.checked, pair.sought = accused, -9, 6
    known.rest("peer", declined)
    assert (planned(known, pair, epoch) == ("me", "peer")) is again


@pytest.mark.parametrize(("epoch", "due"), [(2, False), (3, True), (-1, True)])
def test_recheck_of_an_accused_link(epoch: int, *, due: bool) -> None:
    """Three epochs after the last one, or once the clock was set back."""
    pair = suspicion(ECHO, 6, 10.0)
    pair.accused, pair.checked = "slow", 0
    assert (planned(company(), pair, epoch) == ("me", "peer")) is due


@pytest.mark.parametrize(("turned", "before", "soon"), [(1, 2, False), (2, 0, True)])
def test_parts_that_turn_slow_at_once(turned: int, before: int, *, soon: bool) -> None:
    """Two others whose last round is their first slow one may make it the whole node, by the same
    operation.
    """
    histories = [SignalHistory(TIMED._replace(part=str(part))) for part in range(4)]
    histories[0].recent.append(bad("f1"))
    for part in "12":
        histories.append(SignalHistory(TIMED._replace(size=9, part=part)))
        histories[-1].recent.append(bad("f1"))
    for number, history in enumerate(histories[1 : 1 + turned + before]):
        history.recent.extend([bad("f1"), bad("f2")][number < turned :])
    known = {history.signal: history for history in histories}
    assert early(TIMED, known) is soon
    histories[0].investigation = Investigation((bad("f1"),), 0.0)
    state = PlanningInput(company(), known, {}, {}, (), epoch=6, now=0.0)
    assert bool([*plan(state)]) is not soon, "no round is asked for before it can be told"
