"""The records of a round."""

from __future__ import annotations

import pytest

from dshealthd.probe.observation import Backend, PeerReport, RoundKind, RoundPlan

PLAN = RoundPlan(
    epoch=7,
    kind=RoundKind.RAIL,
    backend=Backend.NCCL,
    members=("b", "a"),
    digest="d",
    steps=((8, 40),),
    ranks=2,
)


@pytest.mark.parametrize(
    ("member", "ranks", "all_"),
    [("b", [1, 0], True), ("a", [2, 3], True), ("a", [0, 1], False), ("a", [2], False)],
)
def test_ranks_of_a_member(member: str, ranks: list[int], *, all_: bool) -> None:
    """The root has the first ones; a member has all of its own, and no other's."""
    assert PLAN.root == "b"
    assert PLAN.has_ranks(member, ranks) is all_


def test_light_round_in_place_of_another() -> None:
    """The same round between the same members, without a GPU."""
    light = PLAN.light()
    assert (light.round, light.epoch, light.members) == (PLAN.round, 7, ("b", "a"))
    assert (light.kind, light.backend) == (RoundKind.LIGHT, Backend.AGENT)
    assert (light.steps, light.ranks) == ((), 1)


@pytest.mark.parametrize(
    ("ratios", "well"),
    [
        ({}, True),
        ({"me": 9.0}, True),
        ({"a": 1.0}, True),
        ({"a": 1.07}, False),
        ({"a": 1.0, "b": 9.0}, False),
        ({"a": 1.0, "b": 9.0, "me": 1.0}, False),
        ({"a": 1.0, "b": 1.0, "c": 9.0}, True),
    ],
)
def test_who_is_well_by_its_own_report(ratios: dict[str, float], *, well: bool) -> None:
    """More than half of its rounds with others than this node were good, or it has had none."""
    assert PeerReport(pairs=ratios).is_well("me", 1.07) is well
