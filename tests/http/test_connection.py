"""For how long each step of a connection is waited for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from aiohttp.web_response import Response
from aiohttp.web_server import Server

from dshealthd.http.connection import Connection, Requests
from dshealthd.http.connection_limiter import ConnectionLimiter


async def test_steps_of_a_connection() -> None:
    """An answer may take six times as long as the headers of its request; between two requests a
    connection is kept for longer than the usual minute from one scrape to the next.
    """

    async def handle(_request: object) -> Response:
        return Response()

    gate, server = ConnectionLimiter(1, 1), Server(handle)
    assert gate.admit("c")
    connection = Connection(
        server, gate, "c", header_timeout=5.0, answered=lambda _request, _answer: None
    )
    loop = asyncio.get_running_loop()
    transport: Any = SimpleNamespace(get_extra_info=lambda _: None)
    before = loop.time()
    connection.connection_made(transport)
    assert before + 5.0 <= connection._until <= loop.time() + 5.0
    before = loop.time()
    connection.begin()
    assert before + 30.0 <= connection._until <= loop.time() + 30.0
    connection.rest()
    assert connection._timer is None
    assert 60.0 < Requests(server, connection).keepalive_timeout < 90.0
    connection.release()
    assert (gate.total, gate.closing) == (0, 0)
