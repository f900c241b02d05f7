"""The schedule: who meets whom in which epoch, a pure function of members, leaves and number.

Even epochs group members of one leaf, odd epochs members of different leaves. With a single leaf,
or without a topology, every epoch is of the first kind; with one member in each leaf every epoch is
of the second.

Promise, extra pairs aside, for as long as the members stay the same: two members of one leaf meet
at least once in any `Timetable.inside` epochs of the first kind, and none of a leaf meet again
before all of it have met; two members of different leaves meet exactly once in any
`Timetable.across` epochs of the second kind. So any two meet within `Timetable.cycle` epochs. For
pairs and l leaves of at most m members `inside` is m - 1 and `across` (l - 1)·m, or m and l·m where
m or l is odd. Where leaves are so unequal that l·m is more than twice the number n of members,
`across` is n - 1 (n where odd) instead, and then counts pairs inside a leaf too.

Extra pairs carry no promise: who has no partner in an epoch (odd numbers, unequal leaves) is paired
with somebody else who has none, of the same leaf first. For pairs, at most one member of all rests
in an epoch, and only where their number is odd.

Groups of more than two have at most the size asked for. No pair may repeat, and with fewer than
size² members full groups would have to repeat one in the second round already, so there the groups
are smaller: four of sixteen at a time, never eight of sixteen.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

PAIR = 2

Seat = tuple[int, int]
"""Number of a block (a leaf, as a rule) and the position of a member in it."""


class Timetable:
    """The groups of every epoch for one list of members.

    Making it sorts the members; after that the group of one member costs O(size), for one without a
    partner O(members of its leaf), and for the one in each leaf that finds none there either
    O(members). Not changed once made.
    """

    def __init__(self, names: Iterable[str], leaves: Mapping[str, str], size: int = PAIR) -> None:
        if size < PAIR:
            message = f"a group has at least {PAIR} members, not {size}"
            raise ValueError(message)
        by_leaf: dict[str, list[str]] = {}
        for name in sorted(set(names)):
            by_leaf.setdefault(leaves.get(name, ""), []).append(name)
        count = sum(map(len, by_leaf.values()))
        blocks = [by_leaf[leaf] for leaf in sorted(by_leaf)]
        largest = max(map(len, blocks), default=0)
        self._within = _Blocks(blocks, size, across=False)
        self._between = _Blocks(blocks, size, across=True)
        if len(blocks) * largest > 2 * count:
            # Leaves so unequal that most would wait for the largest: that everybody meets everybody
            # takes less time, at the price of pairs inside a leaf in these epochs too.
            self._between = _Blocks(
                [[name] for block in blocks for name in block], size, across=True
            )
        self._kinds = (
            (self._within,)
            if len(blocks) < PAIR
            else (self._between,)
            if largest < PAIR
            else (self._within, self._between)
        )

    @property
    def inside(self) -> int:
        """Scheduled epochs of the first kind until all members of each leaf have met.

        0 if there are none of it.
        """
        return self._within.cycle if self._within in self._kinds else 0

    @property
    def across(self) -> int:
        """Scheduled epochs of the second kind until all members of different leaves have met.

        0 if there are none of it.
        """
        return self._between.cycle if self._between in self._kinds else 0

    @property
    def cycle(self) -> int:
        """Epochs of the schedule within which any two members meet."""
        return len(self._kinds) * max(self.inside, self.across)

    def groups(self, epoch: int) -> tuple[tuple[str, ...], ...]:
        """Return all groups scheduled in an epoch, each sorted.

        Who is in none rests. Costs O(members · size).
        """
        blocks, turn = self._turn(epoch)
        return tuple(sorted(blocks.groups(turn)))

    def group_of(self, me: str, epoch: int) -> tuple[str, ...]:
        """Return the scheduled group of one member, sorted and with itself; empty when it rests.

        Raises ValueError for who is no member.
        """
        blocks, turn = self._turn(epoch)
        return blocks.group_of(me, turn)

    def _turn(self, epoch: int) -> tuple[_Blocks, int]:
        """Return the kind of a scheduled epoch, and how many of that kind there were before it."""
        return self._kinds[epoch % len(self._kinds)], epoch // len(self._kinds)


def groups(
    names: Iterable[str], leaves: Mapping[str, str], epoch: int, size: int = PAIR
) -> tuple[tuple[str, ...], ...]:
    """Return all groups scheduled in an epoch; see Timetable. The order of `names` is no matter."""
    return Timetable(names, leaves, size).groups(epoch)


def group_of(
    me: str, names: Iterable[str], leaves: Mapping[str, str], epoch: int, size: int = PAIR
) -> tuple[str, ...]:
    """Return the group of one member in an epoch of the schedule, () when it rests.

    See Timetable, which to keep is cheaper than this.
    """
    return Timetable(names, leaves, size).group_of(me, epoch)


def root_order(group: Iterable[str], epoch: int) -> tuple[str, ...]:
    """Return the members in the order in which they are root of this epoch of the schedule.

    The next takes over where one is silent.

    Highest random weight over (epoch, name): even over members and epochs, and who is missing
    changes nothing for the others.
    """
    return tuple(
        sorted(
            group,
            key=lambda name: (
                hashlib.blake2b(f"{epoch}/{name}".encode(), digest_size=8).digest(),
                name,
            ),
            reverse=True,
        )
    )


def epoch_at(unix_seconds: float, period: float) -> int:
    """Return the number of the schedule's epoch of a moment.

    Epochs are `period` seconds long and are counted from 1970. ValueError if not above 0.
    """
    if not period > 0:
        message = f"an epoch lasts longer than 0 s, not {period}"
        raise ValueError(message)
    return int(unix_seconds // period)


class _Blocks:
    """Members by block, met either inside the blocks or across them."""

    def __init__(self, blocks: Sequence[Sequence[str]], size: int, *, across: bool) -> None:
        largest = max(map(len, blocks), default=0)
        if across and largest > 1:
            # More leaves at once than members in each make no more full groups.
            size = max(PAIR, min(size, largest))
        self._blocks = blocks
        self._size = size
        self._across = across
        self._seats: dict[str, Seat] = {
            name: (b, i) for b, block in enumerate(blocks) for i, name in enumerate(block)
        }
        self._block_rounds = rounds(len(blocks), size) if across else 1
        self._shifts = coprime_modulus(largest, widest(len(blocks), size)) if across else 1
        self.cycle = (
            self._block_rounds * self._shifts
            if across
            else max((rounds(len(block), size) for block in blocks), default=1)
        )

    def group_of(self, me: str, turn: int) -> tuple[str, ...]:
        """Return the scheduled group of one member, () when it rests."""
        seat = self._seats.get(me)
        if seat is None:
            message = f"{me} is no member"
            raise ValueError(message)
        group = self._met(seat, turn)
        if len(group) < PAIR:
            group = next(pair for pair in _extras(self._alone(seat[0], turn), turn) if seat in pair)
        if len(group) < PAIR:
            group = next(pair for pair in _extras(self._remainder(turn), turn) if seat in pair)
        return self._named(group) if len(group) >= PAIR else ()

    def groups(self, turn: int) -> Iterator[tuple[str, ...]]:
        """Yield every scheduled group once."""
        for block, members in enumerate(self._blocks):
            for position in range(len(members)):
                group = self._met((block, position), turn)
                if len(group) >= PAIR and min(group) == (block, position):
                    yield self._named(group)
            yield from self._pairs(self._alone(block, turn), turn)
        yield from self._pairs(self._remainder(turn), turn)

    def _met(self, seat: Seat, turn: int) -> list[Seat]:
        """Return the group that the schedule promises a member: itself alone where it has none."""
        block, position = seat
        if not self._across:
            count = len(self._blocks[block])
            return [
                (block, other)
                for other in design(position, count, self._size, turn % rounds(count, self._size))
            ]
        facing = design(block, len(self._blocks), self._size, turn % self._block_rounds)
        shift = turn // self._block_rounds % self._shifts
        # Member c + t·shift of the t-th block: two blocks of a group meet in every combination once
        # while the shift runs through its values, as the difference of their t has an inverse in
        # this modulus.
        start = position - facing.index(block) * shift
        met = [(other, (start + t * shift) % self._shifts) for t, other in enumerate(facing)]
        return [(other, place) for other, place in met if place < len(self._blocks[other])]

    def _alone(self, block: int, turn: int) -> list[Seat]:
        """Return the members of a block to which the schedule promises no group."""
        seats = [(block, position) for position in range(len(self._blocks[block]))]
        return [seat for seat in seats if len(self._met(seat, turn)) < PAIR]

    def _remainder(self, turn: int) -> list[Seat]:
        """Return the members, at most one in a block, for which the schedule finds no partner in
        their own block either.
        """
        blocks = (self._alone(block, turn) for block in range(len(self._blocks)))
        return [group[0] for alone in blocks for group in _extras(alone, turn) if len(group) < PAIR]

    def _pairs(self, alone: Sequence[Seat], turn: int) -> Iterator[tuple[str, ...]]:
        """Yield the scheduled pairs of those left over, each once."""
        return (self._named(pair) for pair in _extras(alone, turn) if len(pair) == PAIR)

    def _named(self, group: Sequence[Seat]) -> tuple[str, ...]:
        return tuple(sorted(self._blocks[block][position] for block, position in group))


def _extras(alone: Sequence[Seat], turn: int) -> Iterator[list[Seat]]:
    """Yield the scheduled pairs of those left over, and the one that is left of an odd number."""
    count = len(alone)
    # Half a cycle ahead, so that a leaf that is left over as a whole does not repeat the pairs that
    # it has just made.
    turn = (turn + count // 2) % rounds(count, PAIR)
    for position in range(count):
        pair = design(position, count, PAIR, turn)
        if pair[0] == position:
            yield [alone[place] for place in pair]


def rounds(count: int, size: int) -> int:
    """Return in how many scheduled rounds of groups of at most `size` every two of `count` have
    met, by `design`; 1 where one group holds all.
    """
    if count <= size:
        return 1
    width = _width(count, size)
    if width == PAIR:
        return count - 1 if count % 2 == 0 else count
    columns = -(-count // width)
    return coprime_modulus(columns, width) + rounds(columns, size)


def design(position: int, count: int, size: int, turn: int) -> list[int]:
    """Return the scheduled group, sorted, of one of `count` positions in turn 0 … `rounds` - 1.

    No two meet twice in these.

    Pairs by the circle method. Larger groups as lines through a grid of `width` rows and n columns,
    one slope in each turn, as in an affine plane: two lines of different slope share one point at
    most if n has no factor below the number of rows. After all n slopes only the members of each
    row have not met; the rows go through the same again.
    """
    if count <= size:
        return list(range(count))
    width = _width(count, size)
    if width == PAIR:
        return _circle(position, count, turn)
    columns = -(-count // width)
    modulus = coprime_modulus(columns, width)
    column, row = divmod(position, width)
    if turn < modulus:
        start = column - row * turn
        return sorted(
            place
            for t in range(width)
            if (place := (start + t * turn) % modulus * width + t) < count
        )
    return [
        place
        for other in design(column, columns, size, turn - modulus)
        if (place := other * width + row) < count
    ]


def _circle(position: int, count: int, turn: int) -> list[int]:
    """Return the scheduled pair of a position in a turn, one position alone where the count is odd.

    Positions whose sum is the turn, modulo an odd number, meet; the one that would meet itself
    meets the last one, or rests.
    """
    modulus = count - 1 if count % 2 == 0 else count
    if position == modulus:
        # (modulus + 1) / 2 is the inverse of 2.
        return [turn * (modulus + 1) // 2 % modulus, position]
    partner = (turn - position) % modulus
    if partner != position:
        return sorted((position, partner))
    return [position, modulus] if modulus < count else [position]


def _width(count: int, size: int) -> int:
    """Return the largest scheduled group, up to `size`, that can be made of so many without
    repeating a pair at once.
    """
    return size if count >= size * size else max(PAIR, math.isqrt(count))


def widest(count: int, size: int) -> int:
    """Return the size of the largest group that `design` schedules."""
    if count <= size:
        return count
    width = _width(count, size)
    return width if width == PAIR else max(width, widest(-(-count // width), size))


@functools.lru_cache(maxsize=256)
def coprime_modulus(least: int, width: int) -> int:
    """Return the smallest number from `least` on without a common factor with 2 … `width` - 1."""
    factors = math.lcm(*range(1, width))
    return next(
        number for number in itertools.count(max(least, 1)) if math.gcd(number, factors) == 1
    )
