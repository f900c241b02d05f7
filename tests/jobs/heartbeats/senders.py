"""Senders of heartbeats as processes of their own, also of other users and with bad intentions."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping

import psutil

from dshealthd.core.host import Host
from dshealthd.jobs.heartbeats.page import PageHolder, find_page
from dshealthd.training.message import PAGE, POSITION, POSITION_AT, STEP_BIT, Message, encode
from tests.jobs.machines import started

STRANGER = 12345
"""A user that owns nothing here."""
PRELUDE = f"""
import fcntl, mmap, os, sys, time
def page(data=b"", size={PAGE}, seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW):
    file = os.memfd_create("dshealthd-heartbeat", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    os.pwrite(file, data, 0)
    return file
print("begun", flush=True)
"""
FOLLOW = """
file = page(bytes.fromhex(sys.stdin.readline()))
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
        """Have it write bytes into its page, which it makes the first time, or a message with the
        position in its step, and wait until it has.
        """
        if isinstance(data, Message):
            message, data = data, encode(data)
            if message.stage:
                word = message.step << STEP_BIT | message.stage
                data = data.ljust(POSITION_AT, b"\0") + POSITION.pack(word, message.sent)
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.popen.stdin.write(data.hex() + "\n")
        self.popen.stdin.flush()
        assert self.popen.stdout.readline() == "told\n"

    def end(self) -> None:
        """Kill it, and its children."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.pid).children(recursive=True):
                child.kill()
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
    variables: Mapping[str, str], code: str = FOLLOW, user: int | None = None
) -> Iterator[SenderProcess]:
    """Run a sender with these variables and no others, once it waits; `code` may make a `page`.

    While the kernel works on its exec, its environment is empty and its state may be D: a
    collection of that moment finds no rank.
    """
    popen = subprocess.Popen(
        [interpreter(user), "-I", "-c", PRELUDE + code],
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
        assert popen.stdout is not None
        assert popen.stdout.readline() == "begun\n"
        yield sender
    finally:
        sender.end()


def own_pages() -> list[PageHolder]:
    """Return the pages of the processes that this test has started, and of no other's on this
    machine.
    """
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if (page := find_page(Host(), child.pid)) is not None:
                inode = os.fstat(page[0]).st_ino
                os.close(page[0])
                user = child.uids().real
                found.append(PageHolder(child.pid, started(child.pid), user, page[1], inode))
    return found
