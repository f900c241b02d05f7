"""Who meets whom in each epoch."""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dshealthd.probe.members.schedule import (
    ERA,
    FEW,
    MEMBERS,
    Cell,
    Timetable,
    design,
    epoch_at,
    root_order,
    rounds,
)

LAYOUTS = st.lists(st.integers(1, 9), min_size=1, max_size=6)
"""How many members each leaf has."""
EPOCHS = st.integers(0, 1 << 40)


def cluster(layout: list[int]) -> dict[str, str]:
    """Return the leaf of each member of a cluster with the given numbers of members per leaf."""
    return {
        f"gpu{leaf}-{index:03}": f"leaf{leaf}"
        for leaf, count in enumerate(layout)
        for index in range(count)
    }


def met(timetable: Cell | Timetable, epochs: Iterable[int]) -> Counter[tuple[str, ...]]:
    """Count how often any two members are in one group in these epochs."""
    return Counter(
        pair
        for epoch in epochs
        for group in timetable.groups(epoch)
        for pair in itertools.combinations(group, 2)
    )


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(2, 9))
def test_design_lets_every_two_meet_once(count: int, size: int) -> None:
    """In the guaranteed number of rounds, any two positions are in one group exactly once, and
    groups are consistent and not too large.
    """
    shared: Counter[tuple[int, ...]] = Counter()
    for turn in range(rounds(count, size)):
        of = [tuple(design(position, count, size, turn)) for position in range(count)]
        assert all(of[other] == of[position] for position in range(count) for other in of[position])
        assert all(position in group and len(group) <= size for position, group in enumerate(of))
        shared.update(pair for group in set(of) for pair in itertools.combinations(group, 2))
    assert shared == Counter(itertools.combinations(range(count), 2))


@given(LAYOUTS, EPOCHS)
def test_nobody_is_in_two_pairs(layout: list[int], epoch: int) -> None:
    """Pairs are disjoint and sorted; one member of an odd number rests."""
    leaves = cluster(layout)
    made = Timetable(leaves, leaves).groups(epoch)
    members = [name for group in made for name in group]
    assert len(members) == len(set(members))
    assert set(members) <= set(leaves)
    assert all(len(group) == 2 and list(group) == sorted(group) for group in made)
    assert len(leaves) - len(members) == len(leaves) % 2


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
    """With an even number of leaves of one even size there are no extra pairs. Each pair meets once
    in its cycle, in an epoch of its kind.
    """
    leaves = cluster([2 * count] * (2 * (number // 2)))
    timetable = Cell(leaves, leaves)
    even = [2 * epoch for epoch in range(start, start + timetable.inside)]
    odd = [2 * epoch + 1 for epoch in range(start, start + timetable.across)]
    inside = met(timetable, even)
    across = met(timetable, odd)
    expected = list(itertools.combinations(sorted(leaves), 2))
    assert inside == Counter(pair for pair in expected if leaves[pair[0]] == leaves[pair[1]])
    assert across == Counter(pair for pair in expected if leaves[pair[0]] != leaves[pair[1]])
    assert timetable.inside == 2 * count - 1
    assert timetable.across == (len(set(leaves.values())) - 1) * 2 * count


@given(LAYOUTS, st.integers(0, 1 << 20))
def test_even_epochs_stay_inside_leaves(layout: list[int], half: int) -> None:
    """In an even epoch, only members left over by odd leaves meet across leaves."""
    leaves = cluster(layout)
    if len(layout) < 2 or max(layout) < 2:
        return
    crossing = [
        group
        for group in Timetable(leaves, leaves).groups(2 * half)
        if len({leaves[name] for name in group}) > 1
    ]
    assert len(crossing) == sum(count % 2 for count in layout) // 2


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


def test_a_leaf_without_a_partner_does_not_repeat_itself() -> None:
    """With an odd number of leaves, one has no counterpart in an odd epoch. It forms pairs inside,
    but not those of the even epoch before.
    """
    for count in (7, 8):
        leaves = cluster([count] * 3)
        timetable = Timetable(leaves, leaves)
        for epoch in range(0, 100, 2):
            assert not set(timetable.groups(epoch)) & set(timetable.groups(epoch + 1))


def test_one_member_rests() -> None:
    """A single member has no group, and no members make no groups."""
    alone = Timetable(["a"], {})
    assert (alone.groups(3), alone.group_of("a", 3)) == ((), ())
    assert Timetable([], {}).groups(3) == ()


def test_who_is_no_member_is_told_so() -> None:
    """A name that is not a member raises an error, which differs from resting."""
    with pytest.raises(ValueError, match=r"^x is not a member$"):
        Timetable(["a", "b"], {}).group_of("x", 0)


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
    """A kept timetable with 10,000 members answers at the cost of one with 320, and no call
    computes all groups.
    """
    few, many = cluster([32] * 10), cluster(LARGE)
    small, large = Timetable(few, few), Timetable(many, many)

    def ask(timetable: Timetable) -> None:
        for epoch in range(1000):
            timetable.group_of("gpu7-007", epoch)

    # Once in an era the leaves are dealt, which costs as much as asking for some hundred epochs.
    assert calls(lambda: large.company("gpu7-007", 0)) < 0.5 * calls(lambda: ask(small))
    assert calls(lambda: ask(large)) < 1.6 * calls(lambda: ask(small))
    assert calls(lambda: Timetable(many, many)) < 4 * len(many)
    made = large.groups(12_345)
    assert 2 * len(made) == len(many)
    assert all(large.group_of(group[0], 12_345) == group for group in made[::100])


def test_a_node_meets_no_more_in_a_large_fleet() -> None:
    """In an era a node has rounds with some hundred others, whatever the fleet has: all of its
    leaf, all of at least three other leaves, and each of them within the era.
    """
    leaves = cluster(LARGE)
    timetable = Timetable(leaves, leaves)
    for era, me in ((0, "gpu7-007"), (5, "gpu311-000"), (34, "gpu312-015")):
        epochs = range(era * ERA, (era + 1) * ERA)
        company = timetable.company(me, epochs[0])
        assert timetable.company(me, epochs[-1]) == company
        assert len(company) <= MEMBERS
        met = {name for epoch in epochs for name in timetable.group_of(me, epoch)}
        assert met == set(company)
        counts = Counter(leaves[name] for name in company)
        assert len(counts) >= FEW
        assert all(counts[leaf] == [*leaves.values()].count(leaf) for leaf in counts)
    assert timetable.company(me, ERA) != timetable.company(me, 0)


@pytest.mark.parametrize("sizes", [LARGE, [40] * 15, [600, 10], [1] * 600])
def test_all_leaves_meet_over_the_eras(sizes: list[int]) -> None:
    """Within a cycle every two leaves, or parts of a large one, share a cell, so any two members
    meet; in every era each member has exactly one cell.
    """
    leaves = cluster(sizes)
    timetable = Timetable(leaves, leaves)
    one_of_each = [*{leaf: name for name, leaf in leaves.items()}.values()]
    together: set[tuple[str, str]] = set()
    for epoch in range(0, timetable.cycle, ERA):
        found = {timetable.company(name, epoch) for name in one_of_each}
        assert max(map(len, found)) <= MEMBERS
        for company in found:
            together.update(itertools.combinations(sorted({leaves[name] for name in company}), 2))
    assert together == set(itertools.combinations(sorted(set(leaves.values())), 2))


def test_without_a_topology_the_list_is_divided() -> None:
    """Members of unknown leaves are dealt in parts of the list, and all of them meet, too."""
    names = [f"n{number:04}" for number in range(900)]
    timetable = Timetable(names, {})
    found = {
        name: {
            other
            for epoch in range(0, timetable.cycle, ERA)
            for other in timetable.company(name, epoch)
        }
        for name in names[::97]
    }
    assert all(others == set(names) for others in found.values())
    assert len(timetable.groups(7)) == 450


def test_a_small_fleet_has_no_eras() -> None:
    """Up to a cell's size, all members are each other's company for ever."""
    leaves = cluster([32] * 16)
    timetable = Timetable(leaves, leaves)
    assert timetable.company("gpu0-000", 0) == timetable.company("gpu9-003", 10**8)
    assert len(timetable.company("gpu0-000", 0)) == 512
    assert timetable.cycle == 960


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


@pytest.mark.parametrize(
    ("seconds", "period", "epoch"),
    [(0, 10, 0), (9.999, 10, 0), (10, 10, 1), (1.8e9, 10, 180_000_000), (-0.5, 1, -1)],
)
def test_epoch_at(seconds: float, period: float, epoch: int) -> None:
    """Epochs are counted from 1970, so that agents agree without communication."""
    assert epoch_at(seconds, period) == epoch


@given(LAYOUTS, st.integers(-1000, -1))
def test_a_clock_before_1970(layout: list[int], epoch: int) -> None:
    """A negative epoch, from a clock that is far off, is scheduled like any other."""
    leaves = cluster(layout)
    made = Timetable(leaves, leaves).groups(epoch)
    assert len(leaves) - sum(map(len, made)) <= 1
