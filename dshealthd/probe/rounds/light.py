"""A light round with one peer: echoes between agents tell its presence, distance and clock.

A time counts only where neither agent waited for a CPU meanwhile: on a node whose CPUs are busy
that takes a hundred times as long as the network does.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dshealthd.probe.observation import Outcome, Timing
from dshealthd.probe.peers.contract import PeerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dshealthd.probe.rounds.remote_store import Peers

OP = "echo"
ECHOES = 2
"""Empty ones whose times are to count."""
PAYLOAD = bytes(range(256)) * 187
"""What is transferred there and back; with base64 it fits in one message."""
DEADLINE = 2.0
"""Seconds for one echo."""
WAITED = 0.25
"""Share of an echo's time that both agents together may have waited for a CPU.

As shipped (`light_ratio`) an echo of three times the usual is slow; waiting alone cannot make it
so.
"""
TRIES = 32
"""Echoes at most, and ..."""
PATIENCE = 1.0
"""... seconds after which no further one is sent, to have as many that count.

On two cores with a load of 20 one echo in thirty counts. All of them take some 20 ms of CPU.
"""


@dataclass(frozen=True, slots=True)
class Echoes:
    """What the echoes of one peer told."""

    round_trip: float | None
    """Seconds of an empty echo; None where none counts."""
    transfer: float | None
    """Seconds of one with a payload; None where none counts."""
    offset: float
    """Seconds by which the peer's clock is ahead of this node's, from the fastest echo.

    Known to half of that echo's time.
    """

    @property
    def timings(self) -> tuple[Timing, ...]:
        """The light round's known times, as an observation has them; both directions count as
        bandwidth.
        """
        found = []
        if self.round_trip is not None:
            found.append(Timing(OP, 0, self.round_trip, 0.0))
        if self.transfer is not None:
            bandwidth = 2 * len(PAYLOAD) / max(self.transfer, 1e-9)
            found.append(Timing(OP, len(PAYLOAD), self.transfer, bandwidth))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class _Echo:
    payload: bytes
    seconds: float
    offset: float
    here: float
    """Seconds of it that this agent waited for a CPU."""
    there: float
    """Seconds that the peer has waited for one since it began, when it answered."""


async def measure(
    peers: Peers,
    peer: str,
    monotonic: Callable[[], float],
    wall: Callable[[], float],
    waited: Callable[[], float | None],
) -> Echoes:
    """Exchange a light round's echoes. Raises PeerError, also where the payload comes back changed.

    `waited` gives the seconds for which this agent has waited for a CPU; None where that is not
    known, and then every time counts.
    """

    async def exchange(payload: bytes) -> _Echo:
        before, sent_at, sent = waited(), wall(), monotonic()
        answer = await echo(peers, peer, payload, sent_at, DEADLINE)
        seconds = monotonic() - sent
        after = waited()
        return _Echo(
            payload,
            seconds,
            answer["clock"] - (sent_at + seconds / 2),
            0.0 if before is None or after is None else after - before,
            answer.get("waited", 0.0),
        )

    begin = monotonic()
    # The first only tells for how long the peer has waited until now, as the last does until then.
    echoes = [await exchange(b"")]
    while True:
        trips, transfers = _times(echoes, b""), _times(echoes, PAYLOAD)
        done = len(trips) >= ECHOES and transfers
        if done or len(echoes) > TRIES or monotonic() - begin > PATIENCE:
            break
        due = len(echoes) % (ECHOES + 1) == 1
        echoes.append(await exchange(PAYLOAD if due and not transfers else b""))
    return Echoes(
        # Of two the lower: what else takes time in an agent makes an echo longer.
        statistics.median_low(trips) if trips else None,
        transfers[0] if transfers else None,
        min(echoes, key=lambda result: result.seconds).offset,
    )


def _times(echoes: Sequence[_Echo], payload: bytes) -> list[float]:
    """Return the times that count of the echoes with this payload."""
    return [result.seconds for result in _undisturbed(echoes) if result.payload == payload]


def _undisturbed(echoes: Sequence[_Echo]) -> Iterator[_Echo]:
    """Yield the echoes for which neither end waited, or not for long."""
    for before, result, after in zip(echoes, echoes[1:], echoes[2:], strict=False):
        # How long the peer waited while it sent this answer, only the next one tells.
        there = max(0.0, after.there - before.there)
        if result.here + there <= WAITED * result.seconds:
            yield result


async def echo(
    peers: Peers, peer: str, payload: bytes, sent_at: float, deadline: float
) -> dict[str, Any]:
    """Exchange one echo of a light round and return the answer. Raises PeerError.

    `sent_at` is the Unix time of this node; the answer may take `deadline` seconds.
    """
    answer = await peers.call(peer, OP, {"clock": sent_at, "payload": payload}, deadline)
    if answer["payload"] != payload:
        raise PeerError(Outcome.CORRUPTED, "wrong_data")
    return answer
