"""The collecting process as the agent's loop sees it.

Started, talked to in frames, and ended whatever it does.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from dshealthd.core import wire
from dshealthd.core.child import channel, spawn, streams

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping, Sequence

    from dshealthd.core.child import Child

log = logging.getLogger(__name__)

GRACE = 1.0
"""Seconds in which it may end by itself once its channel is closed, and in which SIGKILL must have
ended it.
"""


class CollectionProcess:
    """A process and the socket to it.

    In a session of its own, so that no signal of a terminal reaches it.
    """

    def __init__(
        self, child: Child, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._child = child
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, command: Sequence[str]) -> CollectionProcess:
        """Start the collecting process; its descriptor's number is the last argument.

        StartError.
        """
        what = "the process that takes evidence"
        with channel(what) as (ours, theirs):
            child = spawn(what, [*command, str(theirs.fileno())], descriptors=[theirs.fileno()])
            return cls(child, *await streams(ours))

    async def send(self, message: Mapping[str, Any]) -> None:
        """Send the collecting process a frame. ConnectionError if it has ended."""
        self._writer.write(wire.pack(message))
        await self._writer.drain()

    async def receive(self) -> dict[str, Any]:
        """Return the collecting process's next frame; ValueError or TypeError if it is none,
        IncompleteReadError or ConnectionError at its end.
        """
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
        """Close the channel, and kill the collecting process if it does not end.

        What it has started ends with it; what cannot be killed is left.
        """
        self._writer.close()
        if not (await self._child.ends(GRACE) or await self._child.killed(GRACE)):
            log.error("evidence: process %d cannot be killed", self._child.pid)
