"""The agent's handle of the collecting process: start, frames, and a certain end."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from dshealthd.collection.worker_process import Channel
from dshealthd.core.child import channel, spawn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dshealthd.core.child import Child

log = logging.getLogger(__name__)

GRACE = 1.0
"""Seconds for the process to exit after its channel is closed."""


class CollectionProcess:
    """The collecting process and the channel to it.

    It has a session of its own, so that no terminal signal reaches it.
    """

    def __init__(self, child: Child, frames: Channel) -> None:
        self._child = child
        self._frames = frames

    @classmethod
    async def start(cls, command: Sequence[str]) -> CollectionProcess:
        """Start the collecting process; its descriptor's number is the last argument.

        StartError.
        """
        what = "the evidence process"
        with channel(what) as (ours, theirs):
            child = spawn(what, [*command, str(theirs.fileno())], descriptors=[theirs.fileno()])
            return cls(child, await Channel.opened(ours))

    def send(self, message: Mapping[str, Any]) -> None:
        """Send the collecting process a frame."""
        self._frames.send(message)

    async def receive(self) -> dict[str, Any]:
        """Return the collecting process's next frame.

        ValueError if it is malformed, EOFError if the process has ended.
        """
        while (message := self._frames.receive()) is None:
            await self._frames.changed()
        return message

    async def end(self) -> None:
        """Close the channel, and kill the collecting process if it does not exit.

        Its children end with it. A process that cannot be killed is left behind.
        """
        self._frames.close()
        if not (await self._child.ends(GRACE) or await self._child.killed()):
            log.error("evidence: process %d cannot be killed", self._child.pid)
