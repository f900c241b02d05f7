"""The history of peers: rounds with and reports from the other members, as one agent knows them.

It also chooses the members of extra rounds.
"""

from __future__ import annotations

import zlib
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.probe.members.schedule import Timetable
from dshealthd.probe.observation import Outcome
from dshealthd.probe.verdicts.signals import HARD, UNTIMED

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable, Mapping

    from dshealthd.probe.verdicts.signals import PeerReport

_SHUNNED = 20.0
"""Seconds for which a member that declined is not asked again."""
_BUSY = 2.0
"""The same for a member that is in another round, which will soon be over."""
_RECENT = 60.0
"""Seconds for which a good round shows that a member is well."""
_ECHOES_KEPT = 4
"""Epochs for which a peer's timing of an echo counts. A peer reports it in that epoch and the next
one; the other evidence seldom arrives in these two.
"""
_LATELY = 16
"""Epochs for which a member's report that it is at fault counts, as long as its outages do."""


class _Word(NamedTuple):
    """The last report of a member."""

    at: float
    epoch: int
    told: PeerReport


class PeerHistory:
    """What this agent knows of the other members."""

    def __init__(self, me: str, leaves: Mapping[str, str]) -> None:
        """`leaves` has every member, with "" if its leaf is not known."""
        self.me = me
        self._declined: dict[str, float] = {}
        self._met: dict[str, tuple[float, bool]] = {}
        self._said: dict[str, _Word] = {}
        self._untimed: dict[str, int] = {}
        """Peers that could not time an echo to this node, and the epoch of their last such report.
        """
        self._called: dict[str, tuple[int, float]] = {}
        """Each peer's last report of a timed call to this node: its epoch and the ratio."""
        self._uncalled: dict[str, int] = {}
        """Members that another has failed to call, and the epoch of the last such report."""
        self._called_by: dict[str, dict[str, tuple[int, float]]] = {}
        """Others' recent reports of timed calls to a member, by member and caller: epoch and ratio.
        """
        self.leaves: dict[str, str] = {}
        """The leaf of each member of the company in which this node's rounds take place, "" where
        it is not known.
        """
        self.take_members(leaves)

    def take_members(self, leaves: Mapping[str, str], epoch: int = 0) -> None:
        """Apply a new list of members and drop the history of removed ones."""
        self._every = leaves
        self._timetable = Timetable(leaves, leaves)
        self._company: tuple[str, ...] = ()
        self.turn_to(epoch)

    def turn_to(self, epoch: int) -> bool:
        """Apply the company of an epoch, and tell whether it is another one. What is known of other
        members is dropped: it would grow with the fleet, and be old when they are met again.
        """
        company = self._timetable.company(self.me, epoch)
        if company == self._company:
            return False
        self._company = company
        self.leaves = {name: self._every.get(name, "") for name in company}
        self.leaf = self.leaves.get(self.me, "")
        self.intra_leaf = (
            sum(leaf == self.leaf for leaf in self.leaves.values()) - 1 if self.leaf else 0
        )
        self.inter_leaf = max(0, len(self.leaves) - 1 - self.intra_leaf)
        stores: tuple[dict[str, object], ...] = (
            self._declined,
            self._met,
            self._said,
            self._untimed,
            self._called,
            self._uncalled,
            self._called_by,
        )  # type: ignore[assignment] # only keys are removed
        for store in stores:
            for name in store.keys() - self.leaves.keys():
                del store[name]
        return True

    def admit(self, name: str) -> None:
        """Count a member among the company that is met all the same, such as one of a hung job.
        Until the company changes.
        """
        if name in self._every:
            self.leaves.setdefault(name, self._every[name])

    def near(self, name: str) -> bool:
        """Return whether a peer is known to be on this node's leaf, where the node itself, "", is."""
        return bool(self.leaf) and (not name or self.leaves.get(name) == self.leaf)

    def scheduled(self, members: Iterable[str], epoch: int) -> bool:
        """Return whether the schedule has a round of exactly these members in an epoch."""
        return set(self._timetable.group_of(self.me, epoch)) == set(members)

    def declined(self, name: str, at: float, *, busy: bool = False) -> None:
        """Note that a peer cannot take part now; `busy` if it is in another round."""
        self._declined[name] = at + (_BUSY if busy else _SHUNNED)

    def shuns(self, name: str, now: float) -> bool:
        """Return whether a peer has declined recently and must not be asked yet."""
        return 0 < self._declined.get(name, float("-inf")) - now <= _SHUNNED

    def met(self, name: str, at: float, *, well: bool) -> None:
        """Record how a round with a peer went."""
        self._met[name] = at, well

    def heard(self, name: str, at: float, epoch: int, told: PeerReport) -> None:
        """Record a peer's report."""
        self._said[name] = _Word(at, epoch, told)
        call = told.calls.get(self.me)
        if call == UNTIMED:
            self._untimed[name] = epoch
        elif call is not None:
            self._called[name] = epoch, call
        for other, ratio in told.calls.items():
            if other not in self.leaves or other == self.me:
                continue
            if ratio >= HARD:
                self._uncalled[other] = epoch
            elif ratio != UNTIMED:
                lately = self._called_by.get(other, {}).items()
                self._called_by[other] = {
                    caller: (since, last)
                    for caller, (since, last) in (*lately, (name, (epoch, ratio)))
                    if 0 <= epoch - since <= _ECHOES_KEPT
                }

    def spoke(self, name: str, since: float) -> bool:
        """Return whether a peer has reported anything since a Unix time."""
        return name in self._said and self._said[name].at > since

    def opinions(
        self,
        name: str,
        since: float,
        epoch: int,
        without: Collection[str],
        *,
        calls: bool = False,
        timed: bool = False,
    ) -> list[float]:
        """Return the ratios of others' rounds with a member, reported since the Unix time `since`.

        One for each member that has reported, but none for those in `without`. The member in
        question has been faulty since `epoch`. With `calls`, only rounds that the others led
        count; with `timed`, only those that show more than that the member answers. Reports also
        cover the epoch before: a good ratio that is heard up to one epoch after `epoch` may predate
        the fault and is left out.
        """
        words = [
            (word.told.calls if calls else word.told.pairs, word.epoch)
            for teller, word in self._said.items()
            if word.at > since and teller not in without
        ]
        said = [
            (pairs[name], heard)
            for pairs, heard in words
            if name in pairs and not (timed and pairs[name] == UNTIMED)
        ]
        return [ratio for ratio, heard in said if heard > epoch + 1 or unanswered([ratio])]

    def fails_with_others(self, name: str, epoch: int) -> bool:
        """Return whether a member's last report, if recent, blames itself or has a failed round.
        The failed round must be with a member other than this node.
        """
        word = self._said.get(name)
        if word is None or not 0 <= epoch - word.epoch <= _LATELY:
            return False
        return (word.told.node or 0.0) >= HARD or any(
            ratio >= HARD for ratio in self._with_others(name)
        )

    def uncalled(self, name: str, since: int) -> bool:
        """Return whether another member has reported since an epoch that it could not call it."""
        return self._uncalled.get(name, -1) >= since

    def verified_by_peers(self, name: str, high: float) -> bool:
        """Return whether a member's last rounds with others were mostly good, by its last report.
        For a member on another leaf, only rounds that left its leaf count.
        """
        others = self._with_others(name)
        well = sum(value < high for value in others)
        return well > max(1, len(others) - well)

    def slow_for_others(self, name: str, high: float, epoch: int) -> bool:
        """Return whether another member has recently reported a slow call to a member."""
        return any(
            0 <= epoch - since <= _ECHOES_KEPT and ratio >= high
            for since, ratio in self._called_by.get(name, {}).values()
        )

    def tells_of_others(self, name: str) -> bool:
        """Return whether a member's last report has enough rounds with others to verify it."""
        return len(self._with_others(name)) > 1

    def _with_others(self, name: str) -> list[float]:
        """Return the ratios in a member's last report of those rounds with others that count."""
        pairs: Mapping[str, float] = self._said[name].told.pairs if name in self._said else {}
        leaf = "" if self.near(name) else self.leaves.get(name, "")
        return [
            value
            for peer, value in pairs.items()
            if peer != self.me and not (leaf and self.leaves.get(peer) == leaf)
        ]

    def opinion(self, name: str, *, calls: bool = False) -> float | None:
        """Return the ratio of a peer's rounds with this node by its last report, None without one.
        With `calls`, only rounds that it led and timed count.
        """
        if name not in self._said:
            return None
        told = self._said[name].told
        ratio = (told.calls if calls else told.pairs).get(self.me)
        return None if calls and ratio == UNTIMED else ratio

    def timed_slow(self, name: str, high: float, epoch: int) -> bool:
        """Return whether a peer's last timed call to this node was slow and recent."""
        since, ratio = self._called.get(name, (epoch, 0.0))
        return ratio >= high and 0 <= epoch - since <= _ECHOES_KEPT

    def starves(self, name: str, epoch: int) -> bool:
        """Return whether a peer has recently been unable to time its echoes to this node."""
        return name in self._untimed and 0 <= epoch - self._untimed[name] <= _LATELY

    def well(self, leaf: str, since: float) -> bool:
        """Return whether a round with a member of a leaf has gone well since a Unix time."""
        return any(
            good and at >= since and self.leaves.get(name) == leaf
            for name, (at, good) in self._met.items()
        )

    def witness(self, name: str, epoch: int, now: float) -> str | None:
        """Return the peer that meets a member in an epoch, and knows of it; None without one."""
        for partner in self._timetable.group_of(name, epoch):
            if partner not in {name, self.me} and not self.shuns(partner, now):
                return partner
        return None

    def choose(
        self, *, near: bool, asked: Mapping[str, int], ill: Collection[str], now: float
    ) -> str | None:
        """Return a peer for an extra round, None if there is none. Peers that were asked least
        often by `asked` come first, then those recently found well, in an order of this node's own.
        Nobody in `ill` is chosen.
        """
        best: tuple[int, bool, int, str] | None = None
        for name, leaf in self.leaves.items():
            at, well = self._met.get(name, (0.0, False))
            if (
                name == self.me
                or (bool(self.leaf) and leaf == self.leaf) is not near
                or name in ill
                or self.shuns(name, now)
            ):
                continue
            rank = (
                asked.get(name, 0),
                not (well and 0 <= now - at < _RECENT),
                # If many nodes become suspicious at once, they must not all ask the same member.
                # Not hash(), which differs between processes.
                zlib.crc32(f"{self.me}/{name}".encode()),
                name,
            )
            if best is None or rank < best:
                best = rank
        return best[-1] if best else None


def unanswered(opinions: Iterable[float]) -> bool:
    """Return whether every other member reports this one unreachable."""
    return all(value >= HARD for value in opinions)


INTERMITTENT = "intermittent"
"""The reason of an accusation because of short outages."""
SILENCES = frozenset({Outcome.UNREACHABLE, Outcome.HUNG})
"""Outcomes that count as silence. A refusal does not: an agent refuses briefly when it restarts."""
_SHORT = 3
"""Epochs within which the peer must answer again; a node that boots takes longer."""
_MEMORY = 16
"""Epochs for which a short outage counts."""
_ENOUGH = 3
"""Outages that put the blame on this node, if more peers are involved than may lie."""


class Outages:
    """The short outages that one node has seen."""

    def __init__(self) -> None:
        self._silent: dict[str, tuple[int, int]] = {}
        """Epoch in which each peer was first silent, and how many outages had ended by then."""
        self._ended: deque[tuple[int, str]] = deque(maxlen=_MEMORY)
        self._count = 0

    def silent(self, peer: str, epoch: int) -> None:
        """Note a peer that did not answer: an outage begins."""
        self._silent.setdefault(peer, (epoch, self._count))

    def answered(self, peer: str, epoch: int) -> None:
        """Note a peer that took part in a round: its outage, if any, ends."""
        began, count = self._silent.pop(peer, (-_MEMORY, 0))
        # Overlapping outages count once: this node was cut off for a while.
        if 0 <= epoch - began <= _SHORT and count == self._count:
            self._ended.append((epoch, peer))
            self._count += 1

    def explained(self, peer: str) -> None:
        """Drop the outages of a peer that is known to be at fault itself."""
        self._silent.pop(peer, None)
        self._ended = deque((entry for entry in self._ended if entry[1] != peer), maxlen=_MEMORY)

    def many(self, epoch: int, liars: int) -> bool:
        """Return whether there were so many recent outages that this node is to blame. They must
        involve more peers than the `liars` that may fall silent on purpose, and at least two.
        """
        while self._ended and not 0 <= epoch - self._ended[0][0] <= _MEMORY:
            self._ended.popleft()
        return len(self._ended) >= _ENOUGH and len({peer for _, peer in self._ended}) > max(
            1, liars
        )

    def keep(self, names: Container[str]) -> None:
        """Forget the silence of peers that are not in `names`."""
        self._silent = {peer: since for peer, since in self._silent.items() if peer in names}

    def forget(self) -> None:
        """Forget all outages."""
        self._silent.clear()
        self._ended.clear()
