"""The other members: this node's rounds with them, and their reports."""

from __future__ import annotations

import zlib
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.probe.observation import HARD, PeerReport
from dshealthd.probe.peers.fields import MAX_PAIRS

if TYPE_CHECKING:
    from dshealthd.probe.verdicts.signals import ObservedRound, Signal

_RESTS = 20.0
"""Seconds for which a member that declined is not asked again."""
_BUSY = 2.0
"""The same for a member that is in another round, which will soon be over."""
_RECENT = 60.0
"""Seconds for which a good round shows that a member is well."""
_LOG = 64
"""Rounds, and members' reports, remembered: more than the scheduled and extra ones of _MEMORY
epochs.
"""
_CHOICE = 64
"""Members on either side of its leaf among which a node chooses peers for extra rounds: a few are
needed, and a search among thousands would take milliseconds.
"""
_SHORT = 3
"""Epochs within which a silent peer must answer again for a short outage: booting takes longer."""
_MEMORY = 16
"""Epochs for which a short outage counts."""
_OUTAGES = 3
"""Outages that put the blame on this node."""
_SEVERAL = 5
"""Other members from which on the outages must be with _OUTAGES of them: two may be faulty at once.
Among fewer, with two.
"""


class Met(NamedTuple):
    """A round with a peer, as a whole."""

    round: ObservedRound
    light: bool
    ratio: float
    """The worst of what was bad, otherwise the median."""
    bad: frozenset[Signal]
    """What was bad in it; nothing in a good round."""
    silent: bool
    """Whether the peer gave no answer. A refusal is one: an agent refuses while it restarts."""


class Company:
    """The other members, as this node knows them."""

    def __init__(self, me: str, leaves: Mapping[str, str], high: float) -> None:
        """`leaves` has every member, with "" if its leaf is not known. From a score of `high` on, a
        node blames itself.
        """
        self.me, self.high = me, high
        self.log: deque[Met] = deque(maxlen=_LOG)
        """The last rounds that no peer takes the blame for."""
        self._reports: OrderedDict[str, ObservedRound] = OrderedDict()
        """The last round in which each peer has made a report."""
        self._rests: dict[str, float] = {}
        """Until when a member that declined is not asked again."""
        self.apply_members(leaves)

    def apply_members(self, leaves: Mapping[str, str]) -> None:
        """Apply a new list of members and drop what is known of removed ones."""
        self.leaves = leaves
        self.leaf = leaves.get(self.me, "")
        # If many nodes become suspicious at once, they must not all ask the same member: each has
        # an order of its own. Not by hash(), which differs between processes.
        others = sorted(
            leaves.keys() - {self.me}, key=lambda name: zlib.crc32(f"{self.me}/{name}".encode())
        )
        near = [name for name in others if self.near(name)]
        far = [name for name in others if not self.near(name)]
        self.intra_leaf, self.inter_leaf = len(near), len(far)
        """Other members on this node's leaf, 0 if the leaf is not known; and elsewhere."""
        self._choice = near[:_CHOICE] + far[:_CHOICE]
        self.log = deque((met for met in self.log if met.round.peer in leaves), _LOG)

    def near(self, name: str) -> bool:
        """Return whether a peer is known to be on this node's leaf, where the node itself, "",
        is.
        """
        return bool(self.leaf) and (not name or self.leaves.get(name) == self.leaf)

    def rest(self, name: str, at: float, *, busy: bool = False) -> None:
        """Record that a peer cannot take part now; `busy` if it is in another round."""
        self._rests = {other: end for other, end in self._rests.items() if self.rests(other, at)}
        self._rests[name] = at + (_BUSY if busy else _RESTS)

    def rests(self, name: str, now: float) -> bool:
        """Return whether a peer has declined recently and must not be asked yet."""
        return 0 < self._rests.get(name, float("-inf")) - now <= _RESTS

    def record_report(self, round: ObservedRound) -> None:
        """Record what a peer reported in a round."""
        if round.told is not None:
            self._reports[round.peer] = round
            self._reports.move_to_end(round.peer)
            if len(self._reports) > _LOG:
                self._reports.popitem(last=False)

    def record_gone(self, name: str) -> None:
        """Drop the failed rounds with a peer that others do not reach either: they say nothing of
        this node.
        """
        self.log = deque((met for met in self.log if met.round.peer != name or not met.bad), _LOG)

    def report(self, name: str, since: int = -1) -> PeerReport | None:
        """Return a peer's last report, if it has made one since the round of that number."""
        round = self._reports.get(name)
        return round.told if round is not None and round.number > since else None

    def fails_with_others(self, name: str, epoch: int) -> bool:
        """Return whether a peer's last report, if recent, blames itself or has a failed round with
        another member, also inside its leaf: only good ones say nothing of the way out of it.
        """
        round = self._reports.get(name)
        if round is None or round.told is None or not 0 <= epoch - round.epoch <= _MEMORY:
            return False
        others = (ratio for other, ratio in round.told.pairs.items() if other != self.me)
        return max((round.told.node or 0.0), *others, 0.0) >= HARD

    def pairs_of(self, name: str, report: PeerReport) -> dict[str, float]:
        """Return the ratios in a peer's report of its rounds with others than this node. For a peer
        on another leaf, only those of rounds that left its leaf.
        """
        leaf = "" if self.near(name) else self.leaves.get(name, "")
        return {
            other: ratio
            for other, ratio in report.pairs.items()
            if other != self.me and not (leaf and self.leaves.get(other) == leaf)
        }

    def told(self, epoch: int) -> tuple[dict[str, float], tuple[str, ...]]:
        """Return the ratios of recent rounds by peer, to report them to others, and the peers with
        which these were echoes alone.
        """
        pairs: dict[str, float] = {}
        ran: set[str] = set()
        for met in self.log:
            peer = met.round.peer
            if met.round.epoch < epoch - 1 or (met.light and not met.bad and peer in ran):
                continue  # an echo says nothing good of collectives
            before = pairs.pop(peer, 0.0)
            # Chance makes a round slow, but does not break it: a good one does not undo that.
            pairs[peer] = before if before >= HARD else met.ratio
            ran |= set() if met.light else {peer}
        newest = dict(list(pairs.items())[-MAX_PAIRS:])
        return newest, tuple(peer for peer in newest if peer not in ran)

    def choose(
        self, *, near: bool | None, asked: Mapping[str, int], ill: Collection[str], now: float
    ) -> str | None:
        """Return a peer for an extra round, None if there is none; `near` says on which side it
        must be. Peers that were asked least often by `asked` come first, then those recently found
        well, in an order of this node's own. Nobody in `ill` is chosen.
        """
        well = {met.round.peer for met in self.log if not met.bad and now - met.round.at < _RECENT}
        free = [
            name
            for name in self._choice
            if (near is None or self.near(name) is near)
            and name not in ill
            and not self.rests(name, now)
        ]
        return min(free, key=lambda name: (asked.get(name, 0), name not in well), default=None)

    def is_intermittent(self, epoch: int) -> bool:
        """Return whether peers in turn were silent and answered soon after, so often that this node
        must be losing packets. Those that blame themselves do not count.
        """
        peers = [peer for peer in self._outages(epoch) if not self._is_guilty(peer)]
        others = len(self.leaves) - 1
        return len(peers) >= _OUTAGES and len(set(peers)) >= (_OUTAGES if others >= _SEVERAL else 2)

    def _is_guilty(self, name: str) -> bool:
        report = self.report(name)
        return report is not None and (report.node or 0.0) >= HARD

    def _outages(self, epoch: int) -> Iterator[str]:
        """Yield the peer of each short outage. Overlapping ones count once: this node was cut
        off.
        """
        began: dict[str, ObservedRound] = {}
        over = -1
        for met in self.log:
            round = met.round
            if met.silent:
                began.setdefault(round.peer, round)
                continue
            first = began.pop(round.peer, None)
            if first is None or met.ratio >= HARD:
                continue
            if round.epoch - first.epoch <= _SHORT and first.number > over:
                over = round.number
                if 0 <= epoch - round.epoch <= _MEMORY:
                    yield round.peer
