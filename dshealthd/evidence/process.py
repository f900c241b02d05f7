"""The collecting process as the agent's loop sees it: started, talked to in frames, and ended whatever it does."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
from typing import TYPE_CHECKING, Any

from dshealthd import wire

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

log = logging.getLogger(__name__)

GRACE = 1.0
"""Seconds in which it may end by itself once its channel is closed, and in which SIGKILL must have ended it."""
_PRIVATE = frozenset({"CREDENTIALS_DIRECTORY", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID"})
"""Environment of the agent that is not its business."""


class Process:
    """A process and the socket to it. In a session of its own, so that no signal of a terminal reaches it."""

    def __init__(self, popen: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._popen = popen
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, command: Sequence[str]) -> Process:
        """Start a program, which is given the number of its descriptor as last argument. OSError."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                popen = subprocess.Popen(  # noqa: S603, ASYNC220 - our own interpreter; starting it takes about a millisecond
                    [*command, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env={key: value for key, value in os.environ.items() if key not in _PRIVATE},
                    start_new_session=True,
                )
        except OSError:
            ours.close()
            raise
        reader, writer = await asyncio.open_connection(sock=ours, limit=wire.MAX_FRAME)
        return cls(popen, reader, writer)

    async def send(self, message: Mapping[str, Any]) -> None:
        """Send a frame. ConnectionError if the process has ended."""
        self._writer.write(wire.pack(message))
        await self._writer.drain()

    async def receive(self) -> dict[str, Any]:
        """Return the next frame; ValueError or TypeError if it is none, IncompleteReadError or ConnectionError at the process's end."""
        (size,) = wire.LENGTH.unpack(await self._reader.readexactly(wire.LENGTH.size))
        if size > wire.MAX_FRAME:
            message = f"a frame of {size} bytes"
            raise ValueError(message)
        found = json.loads(await self._reader.readexactly(size))
        if not isinstance(found, dict):
            message = "no JSON object"
            raise TypeError(message)
        return found

    async def end(self) -> None:
        """Close the channel, and kill the process if it does not end. What it has started ends with it; what cannot be killed is left."""
        self._writer.close()
        loop = asyncio.get_running_loop()
        pidfd = os.pidfd_open(self._popen.pid)
        ended = asyncio.Event()

        def reap() -> None:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            self._popen.wait()
            ended.set()

        loop.add_reader(pidfd, reap)
        try:
            async with asyncio.timeout(GRACE):
                await ended.wait()
                return
        except TimeoutError:
            self._popen.send_signal(signal.SIGKILL)
        try:
            async with asyncio.timeout(GRACE):
                await ended.wait()
        except TimeoutError:
            log.error("evidence: process %d cannot be killed", self._popen.pid)
