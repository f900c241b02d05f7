"""The agent of this node as it is asked: for how long, and whether who answers on its port is it.

The port is not a privileged one: where no agent runs, any user can listen on it.
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
"""The user that the agent runs as where it does not run as root."""


_POLL = 0.005
"""Seconds from one look at the kernel's tables to the next."""


class Impostor(Exception):
    """The port of the agent is answered by somebody else."""


def identify(connection: socket.socket, seconds: float = 2.0) -> None:
    """Wait until the local agent has accepted the connection; Impostor where a user's process has.

    Only an agent of root, of this process's user or of the user `dshealthd` is believed. To be
    called before a password is sent. OSError where the kernel's tables cannot be read.
    """
    end = time.monotonic() + seconds
    while (uid := peer_uid(connection)) is None and time.monotonic() < end:
        time.sleep(_POLL)
    if uid is None or uid not in _believed():
        who = "no process of this machine" if uid is None else f"a process of uid {uid}"
        message = f"the port of the agent is answered by {who}, who is not believed"
        raise Impostor(message)


def _believed() -> set[int]:
    """Return the users whose agent is believed.

    From `/etc/passwd` alone: a name service can hang, and a package makes its user there.
    """
    users = {0, os.geteuid()}
    with open("/etc/passwd", encoding="utf-8", errors="replace") as lines:
        users.update(int(line.split(":")[2]) for line in lines if line.startswith(f"{_USER}:"))
    return users


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after so many seconds, whatever name server or local agent does.

    A timeout of the socket alone begins anew with every byte. Only in a process of its own.
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
