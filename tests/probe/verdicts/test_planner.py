"""Which extra round comes next."""

from __future__ import annotations

import pytest

from dshealthd.probe.verdicts.planner import PlanningInput, plan
from dshealthd.probe.verdicts.signals import REACH
from tests.probe.verdicts.test_pairs import company, suspicion


@pytest.mark.parametrize(("sought", "itself"), [(5, False), (6, True)])
def test_call_of_an_unreached_peer(sought: int, *, itself: bool) -> None:
    """Another one is asked to call it, unless who was asked last has not answered: then this node
    does.
    """
    pair = suspicion(REACH, 3)
    pair.words, pair.sought = {"a": (5, True)}, sought
    state = PlanningInput(company(), {}, {"peer": pair}, {}, (), epoch=6, now=0.0)
    caller, called = next(plan(state)).confirmation.members
    assert (caller == "me", called) == (itself, "peer")
