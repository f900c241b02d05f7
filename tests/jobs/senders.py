"""Senders of heartbeats as processes of their own, also of other users and with bad intentions."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

from dshealthd.training.message import Message, encode

STRANGER = 12345
"""A user that owns nothing here."""
PRELUDE = """
import os, socket, sys, time
def connect():
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.connect(sys.argv[1])
    return s
s = connect()
"""
FOLLOW = """
for line in sys.stdin:
    s.send(bytes.fromhex(line))
    print("sent", flush=True)
"""
"""Sends what it is told by its standard input."""


class SenderProcess:
    """A running sender that does as it is told."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self.popen = popen

    @property
    def pid(self) -> int:
        """Return its pid."""
        return self.popen.pid

    def send(self, data: bytes | Message) -> None:
        """Have it send bytes, and wait until it has."""
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.popen.stdin.write((data if isinstance(data, bytes) else encode(data)).hex() + "\n")
        self.popen.stdin.flush()
        assert self.popen.stdout.readline() == "sent\n"

    def end(self) -> None:
        """Kill it."""
        self.popen.kill()
        self.popen.wait()
        for stream in (self.popen.stdin, self.popen.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def interpreter(user: int | None) -> str:
    """Return a Python that the user may run."""
    found = sys.executable if user is None else shutil.which("python3", path="/usr/bin:/bin")
    assert found is not None
    return found


@contextlib.contextmanager
def sending(path: Path, variables: Mapping[str, str], code: str = FOLLOW, user: int | None = None) -> Iterator[SenderProcess]:
    """Run a sender with these variables and no others; `code` has a connection `s`."""
    popen = subprocess.Popen(
        [interpreter(user), "-I", "-c", PRELUDE + code, str(path)],
        env={"PATH": os.defpath, **variables},
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        user=user,
        group=user,
        extra_groups=None if user is None else [],
    )
    sender = SenderProcess(popen)
    try:
        yield sender
    finally:
        sender.end()
