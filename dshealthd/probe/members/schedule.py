"""The schedule: who meets whom in each epoch, a pure function of members, leaves and epoch number.

Even epochs pair members of one leaf, odd epochs members of different leaves. With a single leaf,
or without a topology, every epoch is of the first kind; with one member on each leaf, every epoch
is of the second.

While the members stay the same, the schedule guarantees (extra pairs aside):

- Two members of one leaf meet at least once in any `Cell.inside` epochs of the first kind, and
  no two of a leaf meet again before all of it have met.
- Two members of different leaves meet exactly once in any `Cell.across` epochs of the second
  kind.
- So any two members meet within `Timetable.cycle` epochs.

So that what a node keeps and pays does not grow with the fleet, a large fleet is divided into
cells of whole leaves, `MEMBERS` nodes each at most, and all of the above happens inside a cell. An
era, `ERA` epochs, is long enough for a cell. Then the leaves are dealt anew, by the design that
also makes pairs: no two leaves share a cell again before all have. All members of one leaf stay
together; only a leaf of more than `TOGETHER` members is divided. A fleet that fits into one cell
has no eras.

For l leaves of at most m members, `inside` is m - 1 and `across` is (l - 1)·m, or m and
l·m if m or l is odd. If the leaves are so unequal that l·m is more than twice the number n of
members, `across` is n - 1 (n if odd) instead, and these epochs include pairs inside a leaf.

Extra pairs carry no guarantee: a member without a partner in an epoch (odd numbers, unequal leaves)
is paired with another such member, preferably of the same leaf. At most one member of all rests in
an epoch, and only if their number is odd.
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
MEMBERS = 512
"""Most members among which a node's rounds take place in an era."""
TOGETHER = 64
"""Most members of a leaf that are always in one cell; without a topology, of the list."""
FEW = 4
"""Leaves that a cell has at least, so that what is slow in one stands out."""
ERA = 2 * MEMBERS + 128
"""Epochs for which cells stay: in the largest, any two members meet within 2 * MEMBERS or a few
more, as numbers without common factors are needed.
"""
ERAS_KEPT = 2
"""Eras of which cells are kept: the present one, and the one of a round that ended late."""

Seat = tuple[int, int]
"""Number of a block (usually a leaf), and the position of a member in it."""


class Timetable:
    """The pairs of every epoch for one list of members; immutable but for what it has worked out.
    Creating it sorts the members. After that, finding the pair of one member costs as much as in
    its `Cell`; once in an era, the leaves are dealt.
    """

    def __init__(self, names: Iterable[str], leaves: Mapping[str, str]) -> None:
        self._leaves = leaves
        self._names = tuple(sorted(set(names)))
        one = len(self._names) <= MEMBERS
        self._units = [list(self._names)] if one else _units(self._names, leaves)
        """What is never divided, in the order of the leaves."""
        self._unit_of = {name: n for n, unit in enumerate(self._units) for name in unit}
        # Less than fits: units that would be too few for a cell of their own join another.
        self._width = max(PAIR, MEMBERS // max(1, *map(len, self._units)) + 1 - FEW)
        self._eras = 1 if one else rounds(len(self._units), self._width)
        self._dealt: dict[int, dict[int, tuple[int, ...]]] = {}
        """The cell of each unit, by era."""
        self._made: dict[tuple[int, ...], Cell] = {}

    @property
    def cycle(self) -> int:
        """Epochs within which any two members meet."""
        return self._cell(self._cells(0)[0]).cycle if self._eras == 1 else (self._eras + 1) * ERA

    def groups(self, epoch: int) -> tuple[tuple[str, ...], ...]:
        """Return all pairs of an epoch, sorted; others rest."""
        cells = map(self._cell, sorted(set(self._cells(epoch).values())))
        return tuple(sorted(group for cell in cells for group in cell.groups(epoch)))

    def group_of(self, me: str, epoch: int) -> tuple[str, ...]:
        """Return a member's sorted pair; empty if it rests. Raises ValueError for no member."""
        return self._cell(self._home(me, epoch)).group_of(me, epoch)

    def company(self, me: str, epoch: int) -> tuple[str, ...]:
        """Return the members among which a node's rounds take place in an epoch, with itself. They
        stay the same for an era. Raises ValueError if `me` is not a member.
        """
        return self._names if self._eras == 1 else self._cell(self._home(me, epoch)).names

    def _home(self, me: str, epoch: int) -> tuple[int, ...]:
        unit = self._unit_of.get(me)
        if unit is None:
            message = f"{me} is not a member"
            raise ValueError(message)
        return self._cells(epoch)[unit]

    def _cell(self, units: tuple[int, ...]) -> Cell:
        cell = self._made.get(units)
        if cell is None:
            while len(self._made) >= ERAS_KEPT:
                del self._made[next(iter(self._made))]
            names = (name for unit in units for name in self._units[unit])
            cell = self._made[units] = Cell(names, self._leaves)
        return cell

    def _cells(self, epoch: int) -> dict[int, tuple[int, ...]]:
        era = epoch // ERA % self._eras
        if era not in self._dealt:
            while len(self._dealt) >= ERAS_KEPT:
                del self._dealt[next(iter(self._dealt))]
            count = len(self._units)
            lines = (design(unit, count, self._width, era) for unit in range(count))
            cells = _packed([line for n, line in enumerate(lines) if line[0] == n], self._width)
            self._dealt[era] = {unit: cell for cell in cells for unit in cell}
        return self._dealt[era]


class Cell:
    """The pairs of members all of which meet. Creating it sorts the members. After that, finding
    the pair of one member costs O(1), for one without a partner O(members of its leaf), and for
    the one on each leaf that finds none there either O(members).
    """

    def __init__(self, names: Iterable[str], leaves: Mapping[str, str]) -> None:
        self.names = tuple(sorted(set(names)))
        by_leaf = _by_leaf(self.names, leaves)
        count = sum(map(len, by_leaf.values()))
        blocks = [by_leaf[leaf] for leaf in sorted(by_leaf)]
        largest = max(map(len, blocks), default=0)
        self._within = _Blocks(blocks, across=False)
        self._between = _Blocks(blocks, across=True)
        if len(blocks) * largest > 2 * count:
            # The leaves are so unequal that most would wait for the largest. It takes less time to
            # have everybody meet everybody, at the price of pairs inside a leaf in these epochs.
            self._between = _Blocks([[name] for block in blocks for name in block], across=True)
        self._kinds = (
            (self._within,)
            if len(blocks) < PAIR
            else (self._between,)
            if largest < PAIR
            else (self._within, self._between)
        )

    @property
    def inside(self) -> int:
        """Epochs of the first kind until all members of each leaf have met; 0 if there are none."""
        return self._within.cycle if self._within in self._kinds else 0

    @property
    def across(self) -> int:
        """Epochs of the second kind until all members of different leaves have met; 0 if none."""
        return self._between.cycle if self._between in self._kinds else 0

    @property
    def cycle(self) -> int:
        """Epochs within which any two members meet."""
        return len(self._kinds) * max(self.inside, self.across)

    def groups(self, epoch: int) -> tuple[tuple[str, ...], ...]:
        """Return all pairs of an epoch, sorted; others rest."""
        blocks, turn = self._turn(epoch)
        return tuple(sorted(blocks.groups(turn)))

    def group_of(self, me: str, epoch: int) -> tuple[str, ...]:
        """Return a member's sorted pair; empty if it rests. Raises ValueError for no member."""
        blocks, turn = self._turn(epoch)
        return blocks.group_of(me, turn)

    def _turn(self, epoch: int) -> tuple[_Blocks, int]:
        """Return the blocks for an epoch's kind, and how many epochs of that kind precede it."""
        return self._kinds[epoch % len(self._kinds)], epoch // len(self._kinds)


def _by_leaf(names: Iterable[str], leaves: Mapping[str, str]) -> dict[str, list[str]]:
    by_leaf: dict[str, list[str]] = {}
    for name in names:
        by_leaf.setdefault(leaves.get(name, ""), []).append(name)
    return by_leaf


def _units(names: Iterable[str], leaves: Mapping[str, str]) -> list[list[str]]:
    """Return the members that always share a cell: leaves, and parts of leaves that are large."""
    found = []
    for _, members in sorted(_by_leaf(names, leaves).items()):
        parts = -(-len(members) // TOGETHER)
        size = -(-len(members) // parts)
        found += [members[at : at + size] for at in range(0, len(members), size)]
    return found


def _packed(lines: Sequence[Sequence[int]], width: int) -> list[tuple[int, ...]]:
    """Return cells of up to `width` units, or `FEW` more, of whole lines; short ones share one."""
    cells: list[list[int]] = []
    rest: list[int] = []
    for line in lines:
        if 2 * len(line) >= width:
            cells.append(list(line))
            continue
        if len(rest) + len(line) > width:
            cells.append(rest)
            rest = []
        rest = [*rest, *line]
    if rest and len(rest) < FEW and cells:
        min(cells, key=len).extend(rest)
    elif rest:
        cells.append(rest)
    return [tuple(sorted(cell)) for cell in cells]


def root_order(group: Iterable[str], epoch: int) -> tuple[str, ...]:
    """Return a group in the order in which its members lead in this epoch. If one is silent, the
    next takes over. The order is by highest random weight over (epoch, name): uniform over members
    and epochs, and a missing member does not change the order of the others.
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
    """Return the number of the epoch, `period` seconds long and counted from 1970, of a moment."""
    return int(unix_seconds // period)


class _Blocks:
    """Members by block, and their pairs, either inside the blocks or across them."""

    def __init__(self, blocks: Sequence[Sequence[str]], *, across: bool) -> None:
        self._blocks = blocks
        self._across = across
        self._seats: dict[str, Seat] = {
            name: (b, i) for b, block in enumerate(blocks) for i, name in enumerate(block)
        }
        largest = max(map(len, blocks), default=0)
        self._block_rounds = rounds(len(blocks), PAIR) if across else rounds(largest, PAIR)
        self._shifts = max(1, largest) if across else 1
        self.cycle = self._block_rounds * self._shifts

    def group_of(self, me: str, turn: int) -> tuple[str, ...]:
        """Return the pair of one member, () if it rests."""
        seat = self._seats.get(me)
        if seat is None:
            message = f"{me} is not a member"
            raise ValueError(message)
        group = self._met(seat, turn)
        if len(group) < PAIR:
            group = next(pair for pair in _extras(self._alone(seat[0], turn), turn) if seat in pair)
        if len(group) < PAIR:
            group = next(pair for pair in _extras(self._remainder(turn), turn) if seat in pair)
        return self._named(group) if len(group) >= PAIR else ()

    def groups(self, turn: int) -> Iterator[tuple[str, ...]]:
        """Yield every pair once."""
        for block, members in enumerate(self._blocks):
            for position in range(len(members)):
                group = self._met((block, position), turn)
                if len(group) >= PAIR and min(group) == (block, position):
                    yield self._named(group)
            yield from self._pairs(self._alone(block, turn), turn)
        yield from self._pairs(self._remainder(turn), turn)

    def _met(self, seat: Seat, turn: int) -> list[Seat]:
        """Return the pair that the schedule guarantees a member, itself alone if there is none."""
        block, position = seat
        if not self._across:
            count = len(self._blocks[block])
            pair = design(position, count, PAIR, turn % rounds(count, PAIR))
            return [(block, other) for other in pair]
        facing = design(block, len(self._blocks), PAIR, turn % self._block_rounds)
        shift = turn // self._block_rounds % self._shifts
        # Member c of the first block meets c + shift of the second. While the shift runs through
        # its values, two blocks meet in every combination exactly once.
        start = position - facing.index(block) * shift
        met = [(other, (start + t * shift) % self._shifts) for t, other in enumerate(facing)]
        return [(other, place) for other, place in met if place < len(self._blocks[other])]

    def _alone(self, block: int, turn: int) -> list[Seat]:
        """Return the members of a block to which the schedule guarantees no partner."""
        seats = [(block, position) for position in range(len(self._blocks[block]))]
        return [seat for seat in seats if len(self._met(seat, turn)) < PAIR]

    def _remainder(self, turn: int) -> list[Seat]:
        """Return the members, at most one per block, that find no extra partner in their block."""
        blocks = (self._alone(block, turn) for block in range(len(self._blocks)))
        return [group[0] for alone in blocks for group in _extras(alone, turn) if len(group) < PAIR]

    def _pairs(self, alone: Sequence[Seat], turn: int) -> Iterator[tuple[str, ...]]:
        return (self._named(pair) for pair in _extras(alone, turn) if len(pair) == PAIR)

    def _named(self, group: Sequence[Seat]) -> tuple[str, ...]:
        return tuple(sorted(self._blocks[block][position] for block, position in group))


def _extras(alone: Sequence[Seat], turn: int) -> Iterator[list[Seat]]:
    """Yield the extra pairs of members left over, and the single one left of an odd number."""
    count = len(alone)
    # Half a cycle ahead, so that a leaf left over as a whole does not repeat the pairs that it has
    # just had.
    turn = (turn + count // 2) % rounds(count, PAIR)
    for position in range(count):
        pair = design(position, count, PAIR, turn)
        if pair[0] == position:
            yield [alone[place] for place in pair]


def rounds(count: int, size: int) -> int:
    """Return the number of turns after which every two of `count` have met by `design`. Groups have
    at most `size` members; 1 if one group holds all.
    """
    if count <= size:
        return 1
    width = _width(count, size)
    if width == PAIR:
        return count - 1 if count % 2 == 0 else count
    columns = -(-count // width)
    return coprime_modulus(columns, width) + rounds(columns, size)


def design(position: int, count: int, size: int, turn: int) -> list[int]:
    """Return the sorted group of one of `count` positions in turn 0 … `rounds` - 1.

    No two positions meet twice in these turns.

    Pairs use the circle method. Larger groups are lines through a grid of `width` rows and n
    columns, one slope per turn, as in an affine plane: two lines of different slope share at most
    one point if n has no factor below the number of rows. After all n slopes, only members of the
    same row have not met; each row then goes through the same procedure.
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
    """Return the pair of a position in a turn; if the count is odd, one position is alone. Two
    positions meet if their sum equals the turn, modulo an odd number. The position that would meet
    itself meets the last one, or rests.
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
    """Return the largest group size, up to `size`, that does not repeat a pair right away."""
    return size if count >= size * size else max(PAIR, math.isqrt(count))


@functools.lru_cache(maxsize=256)
def coprime_modulus(least: int, width: int) -> int:
    """Return the smallest number >= `least` that shares no factor with any of 2 … `width` - 1."""
    factors = math.lcm(*range(1, width))
    return next(
        number for number in itertools.count(max(least, 1)) if math.gcd(number, factors) == 1
    )
