"""Short outages of peers: no answer, and soon after one again, as where packets are lost."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from dshealthd.probe.observation import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable

INTERMITTENT = "intermittent"
"""The reason of an accusation for them."""
SILENCES = frozenset({Outcome.UNREACHABLE, Outcome.HUNG})
"""Not a refusal: an agent that is started anew refuses for a moment."""
_SHORT = 3
"""Epochs within which the peer answers again; a node that boots takes longer."""
_MEMORY = 16
"""Epochs for which a short outage counts."""
_ENOUGH = 3
"""Outages that make it this node; with more peers than may lie, so that they are not to blame."""


class Outages:
    """The short outages that one node has met."""

    def __init__(self) -> None:
        self._silent: dict[str, tuple[int, int]] = {}
        """Epoch in which each peer was silent first, and how many outages had ended by then."""
        self._ended: deque[tuple[int, str]] = deque(maxlen=_MEMORY)
        self._count = 0

    def silent(self, peers: Iterable[str], epoch: int) -> None:
        """Note an outage: who gave no answer."""
        for peer in peers:
            self._silent.setdefault(peer, (epoch, self._count))

    def answered(self, peers: Iterable[str], epoch: int) -> None:
        """Note the end of an outage: who took part in a round."""
        for peer in peers:
            began, count = self._silent.pop(peer, (-_MEMORY, 0))
            # One that began before another one had ended is the same: this node was cut off for a
            # while.
            if 0 <= epoch - began <= _SHORT and count == self._count:
                self._ended.append((epoch, peer))
                self._count += 1

    def explained(self, peers: Iterable[str]) -> None:
        """Leave out outages of peers that are known to be at fault themselves."""
        out = set(peers)
        for peer in out:
            self._silent.pop(peer, None)
        self._ended = deque((entry for entry in self._ended if entry[1] not in out), maxlen=_MEMORY)

    def many(self, epoch: int, liars: int) -> bool:
        """Tell whether there were so many outages of late that it is this node.

        They must have come with more peers than the `liars` that may fall silent by intent, and
        with two at least.
        """
        while self._ended and not 0 <= epoch - self._ended[0][0] <= _MEMORY:
            self._ended.popleft()
        return len(self._ended) >= _ENOUGH and len({peer for _, peer in self._ended}) > max(
            1, liars
        )

    def forget(self) -> None:
        """Forget all outages."""
        self._silent.clear()
        self._ended.clear()
