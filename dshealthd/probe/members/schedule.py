"""The schedule: who meets whom in each epoch, a pure function of members, leaves and epoch number.

Even epochs pair members of one leaf, odd epochs members of different leaves. With a single leaf,
or without a topology, every epoch is of the first kind; with one member on each leaf, every epoch
is of the second. A member without a partner in an epoch (odd numbers, unequal leaves) rests.

While the members stay the same, any two meet within `Timetable.cycle` epochs, and in epochs of one
kind no two meet again before all have. For l leaves of at most m members, all of a leaf have met
after m - 1 epochs of the first kind, and all of different leaves after (l - 1)·m of the second, or
m and l·m if m or l is odd. If the leaves are so unequal that l·m is more than twice the number n of
members, it takes n - 1 (n if odd) epochs of the second kind, which include pairs inside a leaf.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

PAIR = 2
JITTER = 1.0
"""Seconds over which the pairs of an epoch spread their starts, at most a fifth of the period."""

Seat = tuple[int, int]
"""Number of a block (usually a leaf), and the position of a member in it."""


class Timetable:
    """The pairs of every epoch for one list of members. Creating it sorts the members. After that,
    finding the pair of one member costs O(1).
    """

    def __init__(self, names: Iterable[str], leaves: Mapping[str, str]) -> None:
        by_leaf: dict[str, list[str]] = {}
        for name in sorted(set(names)):
            by_leaf.setdefault(leaves.get(name, ""), []).append(name)
        blocks = [by_leaf[leaf] for leaf in sorted(by_leaf)]
        count, largest = sum(map(len, blocks)), max(map(len, blocks), default=0)
        within, between = _Blocks(blocks, across=False), _Blocks(blocks, across=True)
        if len(blocks) * largest > 2 * count:
            # Most would wait for the largest leaf. It takes less time to have everybody meet
            # everybody.
            between = _Blocks([[name] for block in blocks for name in block], across=True)
        self._kinds = (
            (within,) if len(blocks) < PAIR else (between,) if largest < PAIR else (within, between)
        )

    @property
    def cycle(self) -> int:
        """Epochs within which any two members meet."""
        return len(self._kinds) * max(kind.cycle for kind in self._kinds)

    def groups(self, epoch: int) -> tuple[tuple[str, ...], ...]:
        """Return all pairs of an epoch, sorted; others rest."""
        names = (name for block in self._kinds[0].blocks for name in block)
        return tuple(sorted({pair for name in names if (pair := self.group_of(name, epoch))}))

    def group_of(self, me: str, epoch: int) -> tuple[str, ...]:
        """Return a member's sorted pair; empty if it rests."""
        turn, kind = divmod(epoch, len(self._kinds))
        return self._kinds[kind].group_of(me, turn)


class _Blocks:
    """Members by block, and their pairs, either inside the blocks or across them."""

    def __init__(self, blocks: Sequence[Sequence[str]], *, across: bool) -> None:
        self.blocks = blocks
        self._across = across
        self._seats: dict[str, Seat] = {
            name: (b, i) for b, block in enumerate(blocks) for i, name in enumerate(block)
        }
        largest = max(map(len, blocks), default=0)
        self._block_turns = turns(len(blocks)) if across else turns(largest)
        self._shifts = max(1, largest) if across else 1
        self.cycle = self._block_turns * self._shifts

    def group_of(self, me: str, turn: int) -> tuple[str, ...]:
        """Return the pair of one member, () if it rests."""
        met = self._met(*self._seats[me], turn)
        return () if met is None else tuple(sorted((me, self.blocks[met[0]][met[1]])))

    def _met(self, block: int, position: int, turn: int) -> Seat | None:
        if not self._across:
            other = partner(position, len(self.blocks[block]), turn)
            return None if other is None else (block, other)
        facing = partner(block, len(self.blocks), turn)
        if facing is None:
            return None
        # Member c of the lower block meets c + shift of the other. While the shift runs through its
        # values, two blocks meet in every combination exactly once.
        shift = turn // self._block_turns
        place = (position + (shift if block < facing else -shift)) % self._shifts
        return (facing, place) if place < len(self.blocks[facing]) else None


def root_order(group: Iterable[str], epoch: int) -> tuple[str, ...]:
    """Return a group in the order in which its members lead in this epoch. If one is silent, the
    next takes over. The order is by highest random weight over (epoch, name): uniform over members
    and epochs.
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


def jitter(epoch: int, pair: Iterable[str], period: float) -> float:
    """Return how many seconds into the epoch a pair's slot begins: the same for both of it."""
    return spread(f"{epoch}/{'/'.join(sorted(pair))}") / 2**32 * min(JITTER, period / 5)


def spread(text: str) -> int:
    """Return a number below 2^32 that spreads slots, the same on every node."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


def epoch_at(unix_seconds: float, period: float) -> int:
    """Return the number of the epoch, `period` seconds long and counted from 1970, of a moment."""
    return int(unix_seconds // period)


def turns(count: int) -> int:
    """Return the number of turns after which every two of `count` have met as `partner` says."""
    return max(1, count - 1 if count % 2 == 0 else count)


def partner(position: int, count: int, turn: int) -> int | None:
    """Return whom one of `count` positions meets in a turn, by the circle method; None if nobody.

    Two positions meet if their sum equals the turn, modulo an odd number. The position that would
    meet itself meets the last one if the count is even.
    """
    modulus = turns(count)
    if position == modulus:
        # (modulus + 1) / 2 is the inverse of 2.
        return turn * (modulus + 1) // 2 % modulus
    other = (turn - position) % modulus
    if other != position:
        return other
    return modulus if modulus < count else None
