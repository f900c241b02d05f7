"""Whether the agent itself answers on its port of this node.

The port is not privileged: where no agent runs, any user can listen on it.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from dshealthd.http.exchange import Unreachable
from dshealthd.linux.socket_owners import peer_uid

if TYPE_CHECKING:
    import socket

_USER = "dshealthd"
"""The agent's user where it does not run as root."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.1
"""Seconds between two looks at whether the connection is accepted, doubled each time: an idle agent
accepts within a millisecond, a starved one takes long."""
_SHARE = 5
"""A look that is slow, because the kernel's tables must be read, waits so many times its cost."""


class Impostor(Unreachable):
    """Another user's process, or none that is known, answers on the agent's port."""


def identify(connection: socket.socket, end: float) -> None:
    """Wait until the local agent has accepted the connection; Impostor if a user's process has.

    Only an agent of root, of this process's user or of the user `dshealthd` is trusted. `end` is on
    the monotonic clock. Call this before sending anything. Raise OSError if the kernel does not
    tell who is at the other end.
    """
    pause = _FIRST_PAUSE
    while True:
        begun = time.monotonic()
        uid = peer_uid(connection)
        now = time.monotonic()
        if uid is not None or now > end:
            break
        time.sleep(min(max(pause, _SHARE * (now - begun)), max(0.0, end - now)))
        pause = min(2 * pause, _LONGEST_PAUSE)
    if uid is None:
        message = "no process of this machine has accepted the connection to the agent's port"
        raise Impostor(message)
    if uid not in _believed():
        message = f"the agent's port is answered by a process of uid {uid}, which is not trusted"
        raise Impostor(message)


def _believed() -> set[int]:
    """Return the users whose agent is trusted.

    Reads only `/etc/passwd`: a name service can hang, and the package creates its user there.
    """
    users = {0, os.geteuid()}
    with open("/etc/passwd", encoding="utf-8", errors="replace") as lines:
        users.update(int(line.split(":")[2]) for line in lines if line.startswith(f"{_USER}:"))
    return users
