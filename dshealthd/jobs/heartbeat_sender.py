"""One sender of heartbeats: its connection, how fast it may be, and what it said last."""

from __future__ import annotations

import asyncio
import enum
import socket
from dataclasses import dataclass

from dshealthd.jobs.heartbeat_identity import Identity, Unidentified
from dshealthd.training.message import Message


class Rejected(enum.StrEnum):
    """Why something that arrived was not taken."""

    MALFORMED = "malformed"
    """No heartbeat; the connection is closed."""
    FORGED = "forged"
    """Sent by another process than the one that connected; the connection is closed."""
    OTHER_USER = "other_user"
    """For a job of another user."""
    RATE = "rate"
    """More a second than a training can send: left in the sender's queue for a while."""
    SENDERS = "senders"
    """A connection more than are kept, or than one user may have."""


@dataclass(slots=True)
class Bucket:
    """So many a second, and a burst."""

    rate: float
    burst: float
    level: float
    filled: float

    @classmethod
    def full(cls, rate: float, burst: float, now: float) -> Bucket:
        """Return one that nothing was taken from; `now` is monotonic time in seconds."""
        return cls(rate, burst, burst, now)

    def take(self, now: float) -> bool:
        """Take one, if there is one."""
        self.level = min(self.burst, self.level + (now - self.filled) * self.rate)
        self.filled = now
        if self.level < 1.0:
            return False
        self.level -= 1.0
        return True


@dataclass(eq=False, slots=True)
class Sender:
    """One connection, and what came over it."""

    connection: socket.socket
    pid: int
    user: int
    bucket: Bucket
    drained: float
    """Monotonic time at which its queue was last seen empty."""
    who: Identity | Unidentified | None = None
    """None before the first message, with which its user is known."""
    message: Message | None = None
    heard: float = 0.0
    """Unix time at which the last message was sent, in seconds."""
    paused: asyncio.TimerHandle | None = None
