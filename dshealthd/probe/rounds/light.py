"""A light round with one peer: echoes between the agents, which tell whether it is there, how far
away, and what its clock says.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.probe.observation import Outcome, Timing
from dshealthd.probe.peers.contract import PeerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dshealthd.probe.rounds.remote_store import Peers

OP = "echo"
ECHOES = 3
"""Empty ones. The connection is there already, from the invitation."""
PAYLOAD = bytes(range(256)) * 187
"""What is transferred there and back; with base64 it fits in one message."""
DEADLINE = 2.0
"""Seconds for one echo."""


@dataclass(frozen=True, slots=True)
class Echoes:
    """What the echoes of one peer told."""

    round_trip: float
    """Seconds of an empty echo, the median."""
    transfer: float
    """Seconds of one with a payload."""
    offset: float
    """Seconds by which the peer's clock is ahead of this node's, from the fastest echo.

    Known to half of that echo's time.
    """

    @property
    def timings(self) -> tuple[Timing, ...]:
        """The times as an observation has them; both directions count as bandwidth."""
        return (
            Timing(OP, 0, self.round_trip, 0.0),
            Timing(OP, len(PAYLOAD), self.transfer, 2 * len(PAYLOAD) / max(self.transfer, 1e-9)),
        )


async def measure(
    peers: Peers, peer: str, monotonic: Callable[[], float], wall: Callable[[], float]
) -> Echoes:
    """Exchange echoes with a peer. Raises PeerError, also where the payload comes back changed."""
    times: list[float] = []
    best, offset, transfer = float("inf"), 0.0, 0.0
    for payload in (*(b"",) * ECHOES, PAYLOAD):
        sent_at, sent = wall(), monotonic()
        clock = await echo(peers, peer, payload, sent_at, DEADLINE)
        seconds = monotonic() - sent
        if payload:
            transfer = seconds
        else:
            times.append(seconds)
        if seconds < best:
            best, offset = seconds, clock - (sent_at + seconds / 2)
    return Echoes(statistics.median(times), transfer, offset)


async def echo(peers: Peers, peer: str, payload: bytes, sent_at: float, deadline: float) -> float:
    """Exchange one echo and return what the peer's clock said, in Unix time. Raises PeerError.

    `sent_at` is the Unix time of this node; the answer may take `deadline` seconds.
    """
    answer = await peers.call(peer, OP, {"clock": sent_at, "payload": payload}, deadline)
    if answer["payload"] != payload:
        raise PeerError(Outcome.CORRUPTED, "wrong_data")
    return float(answer["clock"])
