"""Senders of heartbeats as processes of their own, also of other users and with bad intentions."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from dshealthd.training.message import HELLO, PAGE, Message, encode

STRANGER = 12345
"""A user that owns nothing here."""
PRELUDE = f"""
import fcntl, mmap, os, socket, struct, sys, time
def connect():
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.connect(sys.argv[1])
    return s
def page(data=b"", size={PAGE}, seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW):
    file = os.memfd_create("page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    os.pwrite(file, data, 0)
    return file
def hand(s, *files, hello={HELLO!r}, more=()):
    rights = struct.pack("%di" % len(files), *files)
    s.sendmsg([hello], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights), *more])
s = connect()
"""
FOLLOW = """
file = page(bytes.fromhex(sys.stdin.readline()))
hand(s, file)
print("told", flush=True)
for line in sys.stdin:
    os.pwrite(file, bytes.fromhex(line), 0)
    print("told", flush=True)
"""
"""Tells what it is told by its standard input."""


class SenderProcess:
    """A running sender that does as it is told."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self.popen = popen

    @property
    def pid(self) -> int:
        """Return its pid."""
        return self.popen.pid

    def tell(self, data: bytes | Message) -> None:
        """Have it write bytes into its page, which it hands over the first time, and wait until it
        has.
        """
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.popen.stdin.write((data if isinstance(data, bytes) else encode(data)).hex() + "\n")
        self.popen.stdin.flush()
        assert self.popen.stdout.readline() == "told\n"

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
def sending(
    path: Path, variables: Mapping[str, str], code: str = FOLLOW, user: int | None = None
) -> Iterator[SenderProcess]:
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
