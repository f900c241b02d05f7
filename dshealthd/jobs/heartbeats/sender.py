"""One sender of heartbeats: its connection, its page, and what it said last."""

from __future__ import annotations

import array
import enum
import errno
import fcntl
import os
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.jobs.heartbeats.identity import Identity, UnidentifiedSender
from dshealthd.training.message import HELLO, PAGE, Message

if TYPE_CHECKING:
    from collections.abc import Callable

CREDENTIALS = struct.Struct("=iII")
"""struct ucred: pid, user, group."""
_ANCILLARY = socket.CMSG_SPACE(CREDENTIALS.size) + socket.CMSG_SPACE(array.array("i").itemsize)
"""Room for the credentials and one descriptor, or two where the padding has room.

The kernel closes what comes beyond.
"""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class RejectReason(enum.StrEnum):
    """Why a connection was refused, or ended by the agent."""

    MALFORMED = "malformed"
    """It brought no page, a page that cannot be read or holds no heartbeat, or more than a page."""
    FORGED = "forged"
    """The page was handed over by another process than the one that connected, or by one that this
    agent's pids do not name.
    """
    SENDERS = "senders"
    """A connection more than are kept, or than one user may have, or one that gave way."""
    SILENT = "silent"
    """It brought no page in time."""


@dataclass(eq=False, slots=True)
class Sender:
    """One connection, and what came over it."""

    connection: socket.socket
    pid: int
    user: int
    looked: float
    """Monotonic time at which its page was last read.

    Before that, at which its connection was taken.
    """
    since: float
    """Monotonic time at which its connection was taken."""
    moved: float
    """Monotonic time at which its page was last seen to have changed, before that as `since`."""
    who: Identity | UnidentifiedSender | None = None
    """None before it has handed over a page."""
    page: int | None = None
    """The page's descriptor."""
    data: bytes = b""
    """What the page held when it was last read."""
    torn: int = 0
    """How many times since then it held no whole message."""
    message: Message | None = None
    kept: socket.socket | None = None
    """The other end of the connection of one that was adopted, which has none of its own."""
    heard: float = 0.0
    """Unix time at which the last message was written, in seconds."""


def take_page(
    connection: socket.socket, pid: int, user: int, close: Callable[[int], object] = os.close
) -> int | RejectReason:
    """Return the descriptor of the page that a heartbeats' sender hands over, or why there is none.

    OSError if the connection has gone.

    A descriptor that is received and not kept is given to `close`, as closing another's file may
    block, a TCP socket that lingers for as long as its owner wishes. The page
    that is returned is memory of the size of a page, and stays so: to read or close it does not
    block, and does not fail for what another process does with it.
    """
    # One byte more than the greeting, so that a longer one is seen to be none.
    data, ancillary, _, _ = connection.recvmsg(len(HELLO) + 1, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
    if not (data or ancillary):
        raise ConnectionResetError(errno.ECONNRESET, "it ended before it said anything")
    files = array.array("i")
    same = False
    for level, kind, value in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            files.frombytes(value[: len(value) - len(value) % files.itemsize])
        elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            same = CREDENTIALS.unpack(value)[:2] == (pid, user)
    rejected = None
    if not same:
        rejected = RejectReason.FORGED
    elif data != HELLO or len(files) != 1 or not is_page(files[0]):
        rejected = RejectReason.MALFORMED
    if rejected is None:
        return files[0]
    # Whatever was sent is ours by now, also of a message that is refused.
    for file in files:
        close(file)
    return rejected


def is_page(file: int) -> bool:
    """Tell whether a sender's descriptor is memory of the size of a page that nobody can shrink."""
    try:
        # First of all, as only memory has seals: another file's system might not answer the calls
        # after it.
        sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        return sealed and os.fstat(file).st_size == PAGE and len(os.pread(file, PAGE, 0)) == PAGE
    except OSError:
        return False
