"""A light round with one peer: echoes between agents measure its presence, latency and clock.

An echo's time counts only if the agents hardly waited for a CPU meanwhile: on a busy node that wait
is a hundred times the network's time. A path that is slow itself takes most of its echoes' time, so
they count.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.probe.observation import FLOOR, Op, Outcome, Timing
from dshealthd.probe.peers.protocol import PeerError
from dshealthd.probe.rounds.plan import PAYLOAD

if TYPE_CHECKING:
    from dshealthd.probe.node import ThisNode

ECHOES = 2
"""Empty echoes that must count."""
WAITED = 0.25
"""Largest share of an echo's time that both agents together may have waited for a CPU: an echo of
three times the usual is slow (`baseline.LIGHT_RATIO`), and this much waiting cannot make it so.
"""
TRIES = 32
"""Most echoes to send in search of those that count."""
LEAST = 4
"""Echoes that are sent in any case: fewer give no time at all, and those of a node that loses
packets take a second.
"""
PATIENCE = 1.0
"""Seconds after which no further echo is sent. On two cores with a load of 20, one echo in thirty
counts. All of them take some 20 ms of CPU.
"""


@dataclass(frozen=True, slots=True)
class Echoes:
    """What the echoes with one peer measured, without a payload and with one."""

    timings: tuple[Timing, ...]
    """The times that count; their bandwidth counts both directions."""
    offset: float
    """Seconds by which the peer's clock is ahead, accurate to half of the fastest echo's time."""


@dataclass(frozen=True, slots=True)
class _Echo:
    payload: bytes
    seconds: float
    offset: float
    here: float
    """Seconds of the echo that this agent waited for a CPU."""
    there: float
    """Seconds that the peer had waited for a CPU since its start, when it answered."""


async def measure(node: ThisNode, peer: str) -> Echoes:
    """Exchange a light round's echoes. Raises PeerError, also if the payload comes back changed.
    Where it is not known for how long this agent has waited for a CPU, that counts as no wait.
    """

    async def exchange(payload: bytes) -> _Echo:
        before, sent_at, sent = node.waited(), node.wall(), node.monotonic()
        answer = await node.peers.call(peer, "echo", {"clock": sent_at, "payload": payload})
        if answer["payload"] != payload:
            raise PeerError(Outcome.CORRUPTED, "wrong_data")
        seconds = node.monotonic() - sent
        after = node.waited()
        return _Echo(
            payload,
            seconds,
            answer["clock"] - (sent_at + seconds / 2),
            0.0 if before is None or after is None else after - before,
            answer.get("waited", 0.0),
        )

    begin = node.monotonic()
    # The first and last echoes only serve as readings of how long the peer has waited so far.
    echoes = [await exchange(b"")]
    while True:
        trips, transfers = _counting(echoes, b""), _counting(echoes, PAYLOAD)
        done = len(trips) >= ECHOES and transfers
        late = node.monotonic() - begin > PATIENCE and len(echoes) >= LEAST
        if done or len(echoes) > TRIES or late:
            break
        due = len(echoes) % (ECHOES + 1) == 1
        echoes.append(await exchange(PAYLOAD if due and not transfers else b""))
    timings: list[Timing] = []
    # Of the empty echoes the lower of two: an agent's other work only makes an echo longer.
    for payload, counting in ((b"", trips), (PAYLOAD, transfers)):
        size = len(payload)
        if counting:
            seconds = max(FLOOR, statistics.median_low(counting))
            timings.append(Timing(Op.ECHO, size, seconds, 2 * size / seconds))
    offset = min(echoes, key=lambda result: result.seconds).offset
    return Echoes(tuple(timings), offset)


def _counting(echoes: Sequence[_Echo], payload: bytes) -> list[float]:
    """Return the seconds of those of a light round's echoes with this payload that count."""
    return [
        result.seconds
        # Only the next answer includes how long the peer waited while it sent this one.
        for before, result, after in zip(echoes, echoes[1:], echoes[2:], strict=False)
        if result.payload == payload
        and result.here + max(0.0, after.there - before.there) <= WAITED * result.seconds
    ]
