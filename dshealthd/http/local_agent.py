"""Queries to this node's agent: their deadline, and whether the agent itself answers on its port.

The port is not privileged: where no agent runs, any user can listen on it.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dshealthd.linux.socket_owner import peer_uid

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from types import FrameType

_USER = "dshealthd"
"""The agent's user where it does not run as root."""


_POLL = 0.005
"""Seconds between two reads of the kernel's tables."""


class Impostor(Exception):
    """Another user's process answers on the agent's port."""


def identify(connection: socket.socket, seconds: float = 2.0) -> None:
    """Wait until the local agent has accepted the connection; Impostor if a user's process has.

    Only an agent of root, of this process's user or of the user `dshealthd` is trusted. Call this
    before sending a password. Raise OSError if the kernel's tables cannot be read.
    """
    end = time.monotonic() + seconds
    while (uid := peer_uid(connection)) is None and time.monotonic() < end:
        time.sleep(_POLL)
    if uid is None or uid not in _believed():
        who = "no process of this machine" if uid is None else f"a process of uid {uid}"
        message = f"the agent's port is answered by {who}, which is not trusted"
        raise Impostor(message)


def _believed() -> set[int]:
    """Return the users whose agent is trusted.

    Reads only `/etc/passwd`: a name service can hang, and the package creates its user there.
    """
    users = {0, os.geteuid()}
    with open("/etc/passwd", encoding="utf-8", errors="replace") as lines:
        users.update(int(line.split(":")[2]) for line in lines if line.startswith(f"{_USER}:"))
    return users


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after `seconds`, whatever the name server or the local agent does.

    A socket's timeout restarts with every byte. Use this only in a process of its own.
    """

    def expire(_number: int, _frame: FrameType | None) -> None:
        message = f"no answer within {seconds:g} s"
        raise TimeoutError(message)

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
