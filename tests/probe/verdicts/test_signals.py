"""On which signal a failed round is evidence, and which of a signal's rounds are kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dshealthd.probe.observation import Observation, Outcome, RoundKind, Stage
from dshealthd.probe.verdicts.signals import (
    OWN_NODE,
    REACH,
    RUN,
    Measurement,
    Signal,
    SignalHistory,
    hard_signal,
)
from tests.probe.verdicts.test_explanation import TIMED, bad, good


@pytest.mark.parametrize(
    ("kind", "outcome", "stage", "signal"),
    [
        (RoundKind.LOCAL, Outcome.HUNG, Stage.INVITE, OWN_NODE),
        (RoundKind.PAIR, Outcome.UNREACHABLE, Stage.SIZES, REACH),
        (RoundKind.PAIR, Outcome.REFUSED, Stage.SIZES, REACH),
        (RoundKind.PAIR, Outcome.FAILED, Stage.INVITE, REACH),
        (RoundKind.PAIR, Outcome.FAILED, Stage.STORE, RUN),
        (RoundKind.LIGHT, Outcome.HUNG, Stage.SIZES, REACH),
    ],
)
def test_what_a_failed_round_is_evidence_of(
    kind: RoundKind, outcome: Outcome, stage: Stage, signal: Signal
) -> None:
    """Of the way between two agents where one did not answer, otherwise of collectives."""
    assert hard_signal(Observation(0, kind, "gloo", ("a", "b"), outcome, stage)) == signal


def test_what_is_a_time() -> None:
    """It can be unusual by chance; a round that fails cannot."""
    assert [one.timed for one in (REACH, RUN, OWN_NODE, TIMED)] == [False, False, False, True]


@pytest.mark.parametrize(
    ("rounds", "far"),
    [
        ([good("f1"), good("f1"), bad("f1")], 1),  # the newest with each peer
        ([bad("f1"), *(good(f"n{turn}") for turn in range(5))], 1),
        ([bad("f1"), *(good(f"n{turn}") for turn in range(6))], 0),
        ([good("f4"), *(bad(f"f{turn}") for turn in range(3))], 3),
    ],
)
def test_rounds_that_are_kept(rounds: list[Measurement], far: int) -> None:
    """The last six, of which those out of the leaf tell of its uplink."""
    history = SignalHistory(TIMED)
    for one in rounds:
        one.round = replace(one.round, extra=False)
        history.add(one)
    assert sum(one.bad for one in history.far) == far == len(history.far)


@pytest.mark.parametrize(
    ("rounds", "badly"),
    [
        ([bad("f1"), bad("f2"), good("n1")], True),
        ([bad("f1"), good("f2"), good("n1")], False),
        ([bad("f1"), bad("f2"), bad("n1"), good("n2")], False),
    ],
)
def test_an_uplink_that_is_reported(rounds: list[Measurement], *, badly: bool) -> None:
    """Two bad rounds out of the leaf, and none of the last inside it."""
    history = SignalHistory(TIMED)
    history.recent.extend(rounds)
    assert history.leaves_badly() is badly


def test_what_a_peer_explains() -> None:
    """Its bad rounds, not its good ones, nor those with others."""
    history = SignalHistory(TIMED)
    history.recent.extend([good("f1"), bad("f2")])
    history.explain("f1")
    assert len(history.recent) == 2
    history.explain("f2")
    assert [one.round.peer for one in history.recent] == ["f1"]
