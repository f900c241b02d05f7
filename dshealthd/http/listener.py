"""Listening sockets: accept connections, refuse those beyond the limits, and have the others
served, by aiohttp if they speak HTTP.

The limits apply at accept(2): before a TLS handshake, which a client can stall like any other step,
and before a flood can use up the descriptors that the collectors need. asyncio's own server accepts
up to a backlog's length first and only then calls its protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ipaddress
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiohttp.web_request import BaseRequest
from aiohttp.web_server import Server

from dshealthd.core import background
from dshealthd.core.garbage import free_frames
from dshealthd.core.sockets import reset_on_close
from dshealthd.http.connection import Connection
from dshealthd.http.connection_limiter import RESERVE, CloseReason, ConnectionLimiter, client_of

if TYPE_CHECKING:
    from aiohttp.web_response import Response, StreamResponse

    from dshealthd.http.tls import Tls

log = logging.getLogger(__name__)

BACKLOG = 1024
"""Connections that the kernel queues while the agent is busy.

With a shorter queue, a flood would cost other clients a second, after which TCP retries.
"""
ACCEPTED_AT_ONCE = 32
"""Most connections accepted before the loop gets another turn."""
ACCEPT_PAUSE = 0.5
"""Seconds to stop accepting after the kernel was out of descriptors or memory.

The socket stays readable, so the loop would spin.
"""
SHUTDOWN_TIMEOUT = 1.0
"""Seconds that closing a TLS connection, and answers in progress when the server closes, may
take."""
IPV4 = 4
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Reserve:
    """Reserved descriptors, so that accept(2) works when all others are used.

    One is released for each connection accepted while none are free, and taken back when some are
    free again.
    """

    def __init__(self, size: int) -> None:
        """Hold none yet; `refill` takes up to `size`."""
        self._size = size
        self._held: list[int] = []

    def refill(self) -> None:
        """Take back reserved descriptors, as far as some are free."""
        with contextlib.suppress(OSError):
            while len(self._held) < self._size:
                # an eventfd is always available and costs nothing; /proc/self/fd may be missing
                self._held.append(os.eventfd(0, os.EFD_CLOEXEC))

    def release(self) -> bool:
        """Release one reserved descriptor; False if none is left."""
        if not self._held:
            return False
        os.close(self._held.pop())
        return True

    def close(self) -> None:
        """Release all reserved descriptors."""
        while self.release():
            pass


class Listener:
    """The sockets of one listen address, and their connections."""

    def __init__(
        self,
        gate: ConnectionLimiter,
        handle: Callable[[BaseRequest], Awaitable[Response]] | None,
        answered: Callable[[BaseRequest, StreamResponse], None] | None = None,
        *,
        header_timeout: float,
        tls: Callable[[], Awaitable[Tls | None]] | None = None,
        connection: Callable[..., Connection] = Connection,
    ) -> None:
        """Have requests answered by `handle`, which reads no body, or each `connection` serve
        itself.

        `answered` is called with every answer before it is sent. `header_timeout` in seconds is
        that of a handshake, too. `tls` returns the TLS for new connections; None if TLS can never
        be configured.
        """
        self._gate = gate
        self._handle = handle
        self._answered = answered
        self._header_timeout = header_timeout
        self._tls = tls
        self._connection = connection
        self._server: Server | None = None
        self._sockets: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._pauses: dict[socket.socket, asyncio.TimerHandle] = {}
        self._reserve = Reserve(RESERVE)

    @property
    def port(self) -> int:
        """The TCP port of the listening sockets."""
        port: int = self._sockets[0].getsockname()[1]
        return port

    async def start(self, host: str | None, port: int) -> None:
        """Start to listen, or raise OSError.

        `host` None means every address of the machine.
        """
        self._reserve.refill()
        self._gate.keep_descriptors()
        loop = asyncio.get_running_loop()
        if self._handle is not None:
            self._server = Server(
                self._handle,
                request_factory=functools.partial(BaseRequest, loop=loop, client_max_size=1),
                handler_cancellation=True,
            )
        for family, address in await _places(host, port):
            try:
                place = address[0], self.port if self._sockets else port, *address[2:]
                self._sockets.append(_listen(family, place))
            except OSError:
                for listening in self._sockets:
                    listening.close()
                raise
        for listening in self._sockets:
            listening.settimeout(0)
            loop.add_reader(listening, self._accept, listening)

    async def close(self) -> None:
        """Stop listening, cancel TLS handshakes in progress, and close the connections; answers in
        progress get a second.
        """
        self._reserve.close()
        for pause in self._pauses.values():
            pause.cancel()
        for listening in self._sockets:
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        self._sockets.clear()
        # A task must have begun before it is cancelled: it owns a connection that was accepted in
        # this same turn.
        await asyncio.sleep(0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            self._gate.close_silent()
            self._server.pre_shutdown()
            await self._server.shutdown(SHUTDOWN_TIMEOUT)
        await self._gate.emptied(SHUTDOWN_TIMEOUT)

    def _accept(self, listening: socket.socket) -> None:
        self._reserve.refill()
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, address = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # A reserved descriptor makes room for this connection.
                if error.errno in _EXHAUSTED and self._reserve.release():
                    continue
                if error.errno in _EXHAUSTED:
                    self._pause(listening, error)
                    return
                # accept(2) reports that connection's own error; the next one may be good
                continue
            client = client_of(address[0])
            if not self._gate.admit(client):
                reset_on_close(accepted)
                accepted.close()
                continue
            accepted.settimeout(0)
            # Made at once: the gate must count it before the next one is accepted, and while the
            # certificate files are read.
            try:
                connection = self._connection(
                    self._server,
                    self._gate,
                    client,
                    header_timeout=self._header_timeout,
                    answered=self._answered,
                )
            except BaseException:
                self._gate.release(client)
                accepted.close()
                raise
            opening = self._hand_on(accepted, client, connection)
            connection.opening = task = asyncio.get_running_loop().create_task(opening)
            self._tasks.add(task)
            task.add_done_callback(functools.partial(self._handed_on, connection))

    def _pause(self, listening: socket.socket, error: OSError) -> None:
        loop = asyncio.get_running_loop()
        if not self._gate.refused[CloseReason.DESCRIPTORS]:
            log.warning("cannot accept connections: %s", error.strerror)
        self._gate.refused[CloseReason.DESCRIPTORS] += 1
        loop.remove_reader(listening)
        self._pauses[listening] = loop.call_later(
            ACCEPT_PAUSE, loop.add_reader, listening, self._accept, listening
        )

    async def _hand_on(self, accepted: socket.socket, client: str, connection: Connection) -> None:
        try:
            connection.tls = None if self._tls is None else await self._tls()
        except BaseException:
            reset_on_close(accepted)
            accepted.close()
            raise
        handshake: dict[str, Any] = {}
        if connection.tls is not None:
            handshake = {
                "ssl": connection.tls.context,
                "ssl_handshake_timeout": self._header_timeout,
                "ssl_shutdown_timeout": SHUTDOWN_TIMEOUT,
            }
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, accepted, **handshake
            )
        except OSError as error:  # ssl's errors are OSErrors, too
            log.debug("no TLS with %s: %s", client, error)
            self._gate.refused[CloseReason.HANDSHAKE] += 1
            free_frames(error)

    def _handed_on(self, connection: Connection, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if connection.opening is not None:
            # It was never made, and asyncio does not tell it that it is lost. Its task, if
            # cancelled, keeps an exception whose frames refer to it.
            connection.opening = None
            connection.connection_lost(None)


async def _places(
    host: str | None, port: int
) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    """Return families and addresses to listen on. Raise OSError for an unknown name."""
    if host is None:
        return [(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET, ("", port))]
    try:
        version = ipaddress.ip_address(host).version
    except (ValueError, ArithmeticError):
        look_up = functools.partial(
            socket.getaddrinfo, host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        found = await background.call(look_up, "name look-up", None, OSError)
        return list(dict.fromkeys((entry[0], entry[4]) for entry in found))
    return [(socket.AF_INET if version == IPV4 else socket.AF_INET6, (host, port))]


def _listen(family: socket.AddressFamily, address: tuple[Any, ...]) -> socket.socket:
    """Return a socket that listens on an address.

    The empty address means all addresses, of both families where the machine has them.
    """
    everywhere = family == socket.AF_INET6 and not address[0]
    try:
        return socket.create_server(
            address, family=family, backlog=BACKLOG, dualstack_ipv6=everywhere
        )
    except OSError as error:
        if not everywhere or error.errno not in {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}:
            raise
    return socket.create_server(address, backlog=BACKLOG)
