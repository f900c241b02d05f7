"""One sender of heartbeats: its connection, its page, and its last message."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from dshealthd.jobs.goodput import Goodput
from dshealthd.jobs.heartbeats.identity import Identity, UnidentifiedSender
from dshealthd.jobs.own_work import Course
from dshealthd.training.message import Message


@dataclass(eq=False, slots=True)
class Sender:
    """One connection and its page."""

    connection: socket.socket
    pid: int
    user: int
    looked: float
    """Monotonic time of the last read of its page; until then, as `since`, 0 if adopted."""
    since: float
    """Monotonic time at which its connection was accepted."""
    moved: float
    """Monotonic time at which its page was last seen to have changed; until then, as `since`."""
    who: Identity | UnidentifiedSender | None = None
    """None until it has handed over a page."""
    page: int | None = None
    """The page's descriptor."""
    data: bytes = b""
    """Content of the page at its last valid read."""
    torn: int = 0
    """Consecutive reads since then without a whole message."""
    message: Message | None = None
    kept: socket.socket | None = None
    """The other end of the stand-in connection of an adopted sender, which has none of its own."""
    heard: float = 0.0
    """Unix time in seconds at which the last message was written."""
    course: Course = field(default_factory=Course)
    """What its messages told of its steps."""
    goodput: Goodput = field(default_factory=Goodput)
    """Where they say that its time went."""
