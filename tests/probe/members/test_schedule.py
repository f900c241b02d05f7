"""Who meets whom in each epoch."""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dshealthd.probe.members.schedule import Timetable, epoch_at, jitter, partner, root_order, turns

LAYOUTS = st.lists(st.integers(1, 9), min_size=1, max_size=6)
"""How many members each leaf has."""
JITTER = 1.0
EPOCHS = st.integers(-1000, 1 << 40)
"""Negative ones are of a clock that is far off."""


def cluster(layout: list[int]) -> dict[str, str]:
    """Return the leaf of each member of a cluster with the given numbers of members per leaf."""
    return {
        f"gpu{leaf}-{index:03}": f"leaf{leaf}"
        for leaf, count in enumerate(layout)
        for index in range(count)
    }


def met(timetable: Timetable, epochs: Iterable[int]) -> Counter[tuple[str, ...]]:
    """Count how often any two members are in one group in these epochs."""
    return Counter(
        pair
        for epoch in epochs
        for group in timetable.groups(epoch)
        for pair in itertools.combinations(group, 2)
    )


@pytest.mark.parametrize("count", range(1, 12))
def test_every_two_positions_meet_once(count: int) -> None:
    """In the promised number of turns any two positions are partners exactly once."""
    shared: Counter[tuple[int, int]] = Counter()
    for turn in range(turns(count)):
        of = [partner(position, count, turn) for position in range(count)]
        assert all(other is None or of[other] == one for one, other in enumerate(of))
        shared.update((one, other) for one, other in enumerate(of) if other and one < other)
    assert shared == Counter(itertools.combinations(range(count), 2))


@given(LAYOUTS, EPOCHS)
def test_nobody_is_in_two_pairs(layout: list[int], epoch: int) -> None:
    """Pairs are disjoint and sorted."""
    leaves = cluster(layout)
    made = Timetable(leaves, leaves).groups(epoch)
    members = [name for group in made for name in group]
    assert len(members) == len(set(members))
    assert set(members) <= set(leaves)
    assert all(len(group) == 2 and list(group) == sorted(group) for group in made)


@settings(deadline=None)
@given(LAYOUTS, EPOCHS, st.randoms(use_true_random=False))
def test_all_agents_compute_the_same(
    layout: list[int], epoch: int, shuffler: random.Random
) -> None:
    """Each member finds itself in the group in which all others find it, whatever the order in
    which it read the members.
    """
    leaves = cluster(layout)
    made = {name: group for group in Timetable(leaves, leaves).groups(epoch) for name in group}
    for me in leaves:
        order = list(leaves)
        shuffler.shuffle(order)
        known = {name: leaves[name] for name in reversed(order)}
        assert Timetable(order, known).group_of(me, epoch) == made.get(me, ())


@settings(deadline=None)  # some examples are many epochs long
@given(LAYOUTS, st.integers(0, 1 << 20))
def test_every_two_meet_within_the_promise(layout: list[int], start: int) -> None:
    """From any epoch on, every two members meet within `cycle` epochs."""
    leaves = cluster(layout)
    timetable = Timetable(leaves, leaves)
    assert set(met(timetable, range(start, start + timetable.cycle))) == set(
        itertools.combinations(sorted(leaves), 2)
    )


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 6), st.integers(2, 8), st.integers(0, 1 << 20))
def test_no_pair_repeats_until_all_have_met(number: int, count: int, start: int) -> None:
    """With an even number of leaves of one even size nobody rests. Each pair meets once in the
    epochs of its kind that all need to meet.
    """
    leaves = cluster([2 * count] * (2 * (number // 2)))
    timetable = Timetable(leaves, leaves)
    most = (len(set(leaves.values())) - 1) * 2 * count
    assert timetable.cycle == 2 * most
    inside = met(timetable, (2 * epoch for epoch in range(start, start + 2 * count - 1)))
    across = met(timetable, (2 * epoch + 1 for epoch in range(start, start + most)))
    expected = list(itertools.combinations(sorted(leaves), 2))
    assert inside == Counter(pair for pair in expected if leaves[pair[0]] == leaves[pair[1]])
    assert across == Counter(pair for pair in expected if leaves[pair[0]] != leaves[pair[1]])


@given(LAYOUTS, st.integers(0, 1 << 20))
@example([2, 2, 1], 0)
def test_even_epochs_stay_inside_leaves(layout: list[int], half: int) -> None:
    """In an even epoch nobody meets across leaves, and one member of each odd leaf rests."""
    leaves = cluster(layout)
    if len(layout) < 2 or max(layout) < 2:
        return
    groups = Timetable(leaves, leaves).groups(2 * half)
    assert all(len({leaves[name] for name in group}) == 1 for group in groups)
    assert len(groups) == sum(count // 2 for count in layout)


@pytest.mark.parametrize(
    "leaves", [{}, dict.fromkeys("abcdefgh", "s"), {name: name for name in "abcdefgh"}]
)
def test_no_epoch_is_empty(leaves: dict[str, str]) -> None:
    """Without a topology, with one leaf, or with one member on each leaf, no epoch is wasted and
    all meet in one cycle.
    """
    timetable = Timetable("abcdefgh", leaves)
    assert all(len(timetable.groups(epoch)) == 4 for epoch in range(20))
    assert met(timetable, range(timetable.cycle)) == Counter(itertools.combinations("abcdefgh", 2))


def test_one_member_rests() -> None:
    """A single member has no group, and no members make no groups."""
    alone = Timetable(["a"], {})
    assert (alone.groups(3), alone.group_of("a", 3)) == ((), ())
    assert Timetable([], {}).groups(3) == ()


def test_a_skewed_topology_takes_no_longer_than_meeting_everybody() -> None:
    """One large leaf beside many of one node does not make the cycle much longer."""
    leaves = cluster([60] + [1] * 30)
    timetable = Timetable(leaves, leaves)
    assert timetable.cycle <= 2 * len(leaves)
    assert set(met(timetable, range(timetable.cycle))) == set(
        itertools.combinations(sorted(leaves), 2)
    )


def test_schedule_is_the_same_in_every_version() -> None:
    """Agents of different versions meet, so the schedule of given members never changes."""
    leaves = cluster([3, 4])
    timetable = Timetable(leaves, leaves)
    assert [timetable.groups(epoch) for epoch in (0, 1, 1_000_004)] == [
        (("gpu0-001", "gpu0-002"), ("gpu1-000", "gpu1-003"), ("gpu1-001", "gpu1-002")),
        (("gpu0-000", "gpu1-000"), ("gpu0-001", "gpu1-001"), ("gpu0-002", "gpu1-002")),
        (("gpu0-000", "gpu0-001"), ("gpu1-000", "gpu1-001"), ("gpu1-002", "gpu1-003")),
    ]
    three = Timetable("abc", {"a": "x", "b": "y", "c": "z"})
    assert [three.groups(epoch) for epoch in range(3)] == [
        (("b", "c"),),
        (("a", "b"),),
        (("a", "c"),),
    ]
    assert [root_order(["a", "b", "c"], epoch) for epoch in (7, 8)] == [
        ("a", "b", "c"),
        ("b", "c", "a"),
    ]


def calls(work: Callable[[], object]) -> int:
    """Count the function calls of some work, including built-in functions. This measures its cost
    on any machine.
    """
    count = 0

    def event(_frame: object, kind: str, _argument: object) -> None:
        nonlocal count
        count += kind in {"call", "c_call"}

    sys.setprofile(event)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


LARGE = [32] * 312 + [16]
"""Leaves of a fleet of 10,000."""


def test_ten_thousand_members() -> None:
    """A kept timetable with 10,000 members answers at the cost of one with 320."""
    few, many = cluster([32] * 10), cluster(LARGE)
    small, large = Timetable(few, few), Timetable(many, many)

    def ask(timetable: Timetable) -> None:
        for epoch in range(1000):
            timetable.group_of("gpu7-007", epoch)

    assert calls(lambda: ask(large)) < 1.1 * calls(lambda: ask(small))
    assert calls(lambda: Timetable(many, many)) < 4 * len(many)
    made = large.groups(12_344)
    assert 2 * len(made) == len(many)
    assert all(large.group_of(group[0], 12_344) == group for group in made[::100])
    assert large.cycle == 2 * 32 * 313  # two and a quarter days of epochs of ten seconds


def test_roots_are_spread_evenly() -> None:
    """Over many epochs, every member of a group leads equally often and takes over equally often
    (χ², 99.9 %).
    """
    names = [f"gpu{index:02}" for index in range(16)]
    orders = [root_order(names, epoch) for epoch in range(8000)]
    for place in (0, 1, 15):
        counts = Counter(order[place] for order in orders)
        expected = len(orders) / len(names)
        assert (
            sum((counts[name] - expected) ** 2 / expected for name in names) < 37.7
        )  # 15 degrees of freedom


def test_starts_are_spread() -> None:
    """The groups of an epoch start at different moments, each group's members at one."""
    moments = [jitter(7, (f"node{n}", f"node{n + 1}"), 10.0) for n in range(0, 1000, 2)]
    assert 0 <= min(moments) < 0.05 * JITTER < 0.95 * JITTER < max(moments) < JITTER
    assert max(sum(int(moment * 100) == slot for moment in moments) for slot in range(100)) <= 20
    assert jitter(7, ("b", "a"), 10.0) == jitter(7, ("a", "b"), 10.0)
    assert jitter(7, ("a", "b"), 2.5) == jitter(7, ("a", "b"), 5.0) / 2


@pytest.mark.parametrize(
    ("seconds", "period", "epoch"),
    [(0, 10, 0), (9.999, 10, 0), (10, 10, 1), (1.8e9, 10, 180_000_000), (-0.5, 1, -1)],
)
def test_epoch_at(seconds: float, period: float, epoch: int) -> None:
    """Epochs are counted from 1970, so that agents agree without communication."""
    assert epoch_at(seconds, period) == epoch
