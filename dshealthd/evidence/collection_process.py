"""The agent's handle of the collecting process: start, frames, and a certain end."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from dshealthd.core import schema, wire
from dshealthd.core.child import channel, spawn, streams

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping, Sequence

    from dshealthd.core.child import Child

log = logging.getLogger(__name__)

GRACE = 1.0
"""Seconds for the process to exit after its channel is closed, and again after SIGKILL."""


class CollectionProcess:
    """The collecting process and the socket to it.

    It has a session of its own, so that no terminal signal reaches it.
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
        what = "the evidence process"
        with channel(what) as (ours, theirs):
            child = spawn(what, [*command, str(theirs.fileno())], descriptors=[theirs.fileno()])
            return cls(child, *await streams(ours))

    async def send(self, message: Mapping[str, Any]) -> None:
        """Send the collecting process a frame. ConnectionError if it has ended."""
        self._writer.write(wire.pack(message))
        await self._writer.drain()

    async def receive(self) -> dict[str, Any]:
        """Return the collecting process's next frame.

        ValueError or TypeError if it is malformed, IncompleteReadError or ConnectionError if the
        process has ended.
        """
        (size,) = wire.LENGTH.unpack(await self._reader.readexactly(wire.LENGTH.size))
        if size > wire.MAX_FRAME:
            message = f"a frame of {size} bytes"
            raise ValueError(message)
        with schema.reading("the frame"):
            found = json.loads(await self._reader.readexactly(size))
        if not isinstance(found, dict):
            message = "not a JSON object"
            raise TypeError(message)
        return found

    async def end(self) -> None:
        """Close the channel, and kill the collecting process if it does not exit.

        Its children end with it. A process that cannot be killed is left behind.
        """
        self._writer.close()
        if not (await self._child.ends(GRACE) or await self._child.killed(GRACE)):
            log.error("evidence: process %d cannot be killed", self._child.pid)
