"""Short outages of peers: one does not answer, and soon after it does, as with packet loss."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from dshealthd.probe.observation import Outcome

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

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

    def silent(self, peers: Iterable[str], epoch: int) -> None:
        """Note peers that did not answer: an outage begins."""
        for peer in peers:
            self._silent.setdefault(peer, (epoch, self._count))

    def answered(self, peers: Iterable[str], epoch: int) -> None:
        """Note peers that took part in a round: their outage, if any, ends."""
        for peer in peers:
            began, count = self._silent.pop(peer, (-_MEMORY, 0))
            # Overlapping outages count once: this node was cut off for a while.
            if 0 <= epoch - began <= _SHORT and count == self._count:
                self._ended.append((epoch, peer))
                self._count += 1

    def explained(self, peers: Iterable[str]) -> None:
        """Drop the outages of peers that are known to be at fault themselves."""
        out = set(peers)
        for peer in out:
            self._silent.pop(peer, None)
        self._ended = deque((entry for entry in self._ended if entry[1] not in out), maxlen=_MEMORY)

    def many(self, epoch: int, liars: int) -> bool:
        """Tell whether there were so many recent outages that this node is to blame.

        They must involve more peers than the `liars` that may fall silent on purpose, and at least
        two.
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
