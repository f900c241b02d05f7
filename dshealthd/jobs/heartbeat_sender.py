"""One sender of heartbeats: its connection, and what it said last."""

from __future__ import annotations

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
    """Turns in which a sender had more than a training can have sent since: the rest waits in the sender's queue."""
    SENDERS = "senders"
    """A connection more than are kept, or than one user may have."""


@dataclass(eq=False, slots=True)
class Sender:
    """One connection, and what came over it."""

    connection: socket.socket
    pid: int
    user: int
    drained: float
    """Monotonic time at which its queue was last seen empty."""
    who: Identity | Unidentified | None = None
    """None before the first message, with which its user is known."""
    message: Message | None = None
    heard: float = 0.0
    """Unix time at which the last message was sent, in seconds."""
