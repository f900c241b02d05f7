"""Connections of the peer listener: a stranger's may be evicted, an authenticated node's stays."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, ClassVar

from dshealthd.http.connection import IDLE_TIMEOUT, Connection
from dshealthd.http.connection_limiter import CloseReason, ConnectionLimiter
from dshealthd.probe.peers.protocol import DEFECT, FrameError, Frames, Hello, PeerSession

if TYPE_CHECKING:
    import asyncio

log = logging.getLogger(__name__)


class PeerConnection(Connection):
    """One caller's connection: a frame at a time, and its answer."""

    _gate: PeerGate

    def __init__(
        self,
        serve: Callable[[PeerConnection, bytes | None], Coroutine[Any, Any, None]],
        manager: Any,
        gate: PeerGate,
        client: str,
        *,
        header_timeout: float,
        answered: Any,
    ) -> None:
        """Register with the gate as a stranger's connection from `client`. `serve` answers each
        frame with `answer` or `refuse`; it gets None for data that is none.
        """
        super().__init__(manager, gate, client, header_timeout=header_timeout, answered=answered)
        self.hello: Hello | None = None
        """What the caller claims; None before its first frame."""
        self.challenge = ""
        self.session: PeerSession | None = None
        """What requests and answers are signed with; None until one has proved who sent it."""
        self._serve = serve
        self._frames = Frames()
        self._receiving = False
        self._blocked = False
        """Whether the caller has not read its last answer yet."""
        self._task: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """The address that the peer's connection comes from."""
        peer = None if self.transport is None else self.transport.get_extra_info("peername")
        return str(peer[0]) if peer else ""

    def prove(self, session: PeerSession) -> None:
        """Record that a request has proved who is at the connection's other end."""
        self.session = session
        if self._client is not None:
            self._gate.know(self._client)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the timeout for the first frame of a caller of the peer API."""
        super().connection_made(transport)
        if self.transport is not None:
            # So `pause_writing` is called for whatever the caller has not read at once.
            self.transport.set_write_buffer_limits(0)

    def data_received(self, data: bytes) -> None:
        """Have a frame served once it is complete, within a timeout from its first byte on."""
        if self._client is None or self.transport is None:
            return  # evicted
        if not self._receiving and self._task is None:
            self._receiving = True
            self._gate.awaits(self._client, self)
            if self.session is not None:
                self._allow(self._header_timeout, CloseReason.HEADERS)
        frame = None
        try:
            if self._task is not None or self._blocked:
                raise FrameError  # noqa: TRY301 - a caller waits for its answer
            frame = self._frames.add(data)
            if frame is None:
                return
        except FrameError:
            if self._task is not None:
                self._task.cancel()
        self.begin()
        self._receiving = False
        self._task = self._loop.create_task(self._serve(self, frame))
        self._task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("answering a peer failed; this is a defect of dshealthd", exc_info=error)
        if self.session is None:
            self.refuse()
        else:
            self.answer(self.session.sign("answer", DEFECT.encode()))

    def answer(self, frame: bytes) -> None:
        """Send the answer to the frame that is being served, and await the next one."""
        self._task = None
        if self.transport is None or self._client is None:
            return
        self.transport.write(frame)
        if self._gate.ends:
            self.transport.close()
        elif not self._blocked:
            self.rest()

    def refuse(self, frame: bytes = b"") -> None:
        """Send a peer a last frame, if any, and close its connection."""
        self._task = None
        if self.transport is not None and self._client is not None:
            self.transport.write(frame)
            self.transport.close()

    def pause_writing(self) -> None:
        """Serve a peer's connection nothing more until the caller has read its answer."""
        self._blocked = True

    def resume_writing(self) -> None:
        """Await a peer's next frame on its connection: no more was served meanwhile."""
        self._blocked = False
        self.rest()

    def rest(self) -> None:
        """Record that an answer was sent; a stranger must send its next frame soon."""
        super().rest()
        if self.session is None and self._client is not None:
            self._gate.awaits(self._client, self)
        stranger = self.session is None
        self._allow(self._header_timeout if stranger else IDLE_TIMEOUT, CloseReason.HEADERS)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Give up the peer's request that is being served on a lost connection."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        super().connection_lost(exc)

    def _expire(self) -> None:
        if self.session is None or self._receiving or self._task is not None or self._blocked:
            super()._expire()
        elif self.transport is not None:  # an idle node's connection, which nobody refuses
            self.transport.abort()


class PeerGate(ConnectionLimiter):
    """A gate that, when full, evicts only strangers. So flooding the listener with connections does
    not keep nodes out: they need only a few milliseconds to authenticate. Strangers go first whose
    address has never authenticated.
    """

    answered_are_known: ClassVar[bool] = False
    """Only clients that have proved who they are count as known."""
    ends = False
    """Whether connections are closed after the answers in progress."""

    def end(self) -> None:
        """Close peers' connections without a request in progress, and the others after it."""
        self.ends = True
        idle = [connection for connections in self._idle.values() for connection in connections]
        for connection in (*self._awaiting, *idle):
            self.closing += 1
            connection.evict()

    def close_answering(self) -> None:
        """Close peers' connections whose request is still in progress."""
        for connection in list(self._answering):
            self.closing += 1
            connection.evict()

    def _longest_idle(self, _client: str) -> None:
        """An authenticated node is never evicted, however long it is idle: the newcomer may be
        anyone.
        """

    def _slow(self) -> None:
        """A node's connection is not evicted while its request is being answered, either."""
