"""Hostile clients: the server keeps its descriptors, its CPU and its answers for the others."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import re
import resource
import socket
import threading
import time
from asyncio import Transport
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dshealthd.config.config import Web
from dshealthd.http.connection import Connection, Requests
from tests.flood import flooding
from tests.leftovers import without_search
from tests.stopwatch import Stopwatch
from tests.waiting import until
from tests.web.serving import (
    Served,
    answered,
    closed_after,
    large_snapshot,
    server_process,
    serving,
)

MOMENT = 0.25
SLOW = 1.0

REFUSED = "dshealthd_web_connections_refused_total"
PLACES = Web().max_connections_per_address
UNFINISHED = b"GET /api/v1/targets HTTP/1.1\r\nHost: x\r\n\r\n"
"""A request whose answer never comes, where `endless` makes it."""
REQUEST = b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n"


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def connections(
    served: Served, count: int, sources: tuple[str, ...]
) -> Iterator[list[socket.socket]]:
    """Open connections from addresses in turn. Some that are refused may be among them, closed by
    the server.
    """
    with contextlib.ExitStack() as stack:
        opened = []
        for number in range(count):
            with contextlib.suppress(ConnectionError):
                opened.append(stack.enter_context(served.connect(sources[number % len(sources)])))
        yield opened


async def endless() -> bytes:
    """Make a document that is never done."""
    await asyncio.Event().wait()
    return b""


def in_progress(served: Served) -> int:
    """Return how many requests the server is answering."""
    assert served.server is not None
    return len(served.server._gate._answering)


def assert_others_are_served(served: Served) -> None:
    """Check that twenty clients who have not been there before are answered, and none refused."""
    for number in range(1, 21):
        assert served.ask("/-/healthy", source=f"127.0.3.{number}")[0].status == 200
    assert served.metric(REFUSED, "connections") == 0


def is_refused(served: Served, source: str) -> bool:
    """Connect, and tell whether the server closes the connection at once."""
    try:
        with served.connect(source) as connection:
            return closed_after(connection) < 0.5
    except ConnectionResetError:
        return True


def answered_and_closed(served: Served) -> None:
    """Have 20 requests answered, each over a connection of its own."""
    for _ in range(20):
        with served.connect() as client:
            client.sendall(REQUEST.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            assert client.recv(100).startswith(b"HTTP/1.1 ")
            closed_after(client)


def refused_requests(served: Served) -> None:
    """Have 20 invalid requests refused."""
    for _ in range(20):
        with served.connect() as client:
            client.sendall(b"\0nonsense\r\n\r\n")
            assert b" 400 Bad Request" in client.recv(100)


def silent_and_evicted(served: Served) -> None:
    """Have connections that say nothing replace each other, and close those that are left."""
    with connections(served, 3 * PLACES, ("127.0.0.1",)):
        pass


@pytest.mark.parametrize("clients", [answered_and_closed, refused_requests, silent_and_evicted])
def test_nothing_is_left_of_connections(clients: Callable[[Served], None]) -> None:
    """They are freed as they close, not only when cycles are searched for."""
    with serving() as served, without_search(Connection, Requests, Transport) as gone:
        clients(served)
        until(gone)


def test_silent_connections_take_little() -> None:
    """What reads requests is made at a connection's first byte, not for a crowd that is silent."""
    with (
        serving() as served,
        without_search(Requests) as none_read,
        connections(served, PLACES, ("127.0.0.1",)) as crowd,
    ):
        until(lambda: served.metric("dshealthd_web_connections") == PLACES)
        assert none_read()
        crowd[0].sendall(REQUEST)
        assert answered(crowd[0]) == 200
        assert not none_read()


@pytest.mark.parametrize(
    "start",
    [b"", b"GET /", b"GET /metrics HTTP/1.1\r\nHost: x\r\nA"],
    ids=["nothing", "no line", "no end"],
)
def test_slow_headers_end_the_connection(start: bytes) -> None:
    """A client that does not complete its headers in time is closed and counted, even while it goes
    on to send.
    """
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(serving(header_timeout=0.4))
        started = time.monotonic()
        connection = stack.enter_context(served.connect())
        trickle = threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                connection.sendall(start)
                while not trickle.wait(0.05):
                    connection.send(b"a" if start else b"")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            assert closed_after(connection) <= 1.0
            assert time.monotonic() - started >= 0.2
        finally:
            trickle.set()
            thread.join()
        assert served.metric(REFUSED, "header_timeout") == 1


def test_idle_connection_is_kept_and_its_next_request_is_timed() -> None:
    """Between requests a connection may wait longer than headers may. Once the next request has
    begun, its headers are timed again.
    """
    with serving(header_timeout=1.5) as served, served.connect() as connection:
        connection.sendall(REQUEST)
        assert answered(connection) == 200
        time.sleep(2.0)
        connection.sendall(REQUEST)
        assert answered(connection) == 200
        connection.sendall(REQUEST[:10])
        assert closed_after(connection) <= 2.5
        assert served.metric(REFUSED, "header_timeout") == 1


@pytest.mark.parametrize(("count", "sources", "next_one", "reason", "other"), [
    (8, ("127.0.0.3",), "127.0.0.3", "connections_of_address", "127.0.0.4"),
    (5, ("127.0.0.3", "127.0.0.4"), "127.0.0.5", "connections", None),
])  # fmt: skip
def test_connections_are_bounded(
    count: int, sources: tuple[str, ...], next_one: str, reason: str, other: str | None
) -> None:
    """Where eight requests of one address are being answered, its next connection is closed at once
    and counted, and others are served; beyond web.max_connections, nobody is. When one ends, the
    next is.
    """
    limits: Any = {} if other else {"max_connections": count}
    with serving(targets=endless, **limits) as served, connections(served, count, sources) as held:
        for connection in held:
            connection.sendall(UNFINISHED)
        until(lambda: in_progress(served) == count)
        assert is_refused(served, next_one)
        assert served.metric(REFUSED, reason) == 1
        if other is not None:
            assert served.ask("/-/healthy", source=other)[0].status == 200
        held[0].close()
        until(lambda: served.metric("dshealthd_web_connections") == count - 1)
        assert served.ask("/-/healthy", source=next_one)[0].status == 200


def test_idle_connection_makes_room_for_its_own_client() -> None:
    """A client at its limit, as two browsers behind one address are, gets in for one of its idle
    connections. One that has begun its next request is none.
    """
    with serving(max_connections=9) as served, connections(served, 8, ("127.0.0.3",)) as opened:
        for connection in opened:
            connection.sendall(REQUEST)
            assert answered(connection) == 200
        opened[0].sendall(REQUEST[:9])
        assert served.ask("/-/healthy")[0].status == 200  # by then the beginning was read
        assert served.ask("/-/healthy", source="127.0.0.3")[0].status == 200
        assert closed_after(opened[1]) < 0.5
        assert served.metric(REFUSED, "connections_of_address") == 0
        opened[0].sendall(REQUEST[9:])
        assert answered(opened[0]) == 200


def test_silent_connections_of_many_addresses_do_not_shut_out_a_scrape() -> None:
    """Who holds connections and says nothing, from all of 127.0.0.0/8, gives way to who asks. A
    kept connection of who has asked stays.
    """
    addresses = tuple(f"127.0.2.{number}" for number in range(1, 33))
    with (
        serving(max_connections=32, header_timeout=60.0) as served,
        served.connect("127.0.0.3") as scraper,
    ):
        scraper.sendall(REQUEST)
        assert answered(scraper) == 200
        with connections(served, 31, addresses):
            until(lambda: served.metric("dshealthd_web_connections") == 32)
            time.sleep(2 * MOMENT)
            assert_others_are_served(served)
            scraper.sendall(REQUEST)
            assert answered(scraper) == 200
            assert served.metric(REFUSED, "connections") == 0
            assert served.metric(REFUSED, "replaced") >= 1


@pytest.mark.parametrize(
    ("first", "then", "seconds"),
    [(REQUEST, b"GET /metr", 2 * MOMENT), (b"", UNFINISHED, SLOW)],
    ids=["half-sent", "unfinished"],
)
def test_requests_of_many_addresses_do_not_shut_out_a_scrape(
    first: bytes, then: bytes, seconds: float
) -> None:
    """Nor does who asks once, and begins another request that never ends; nor who is never done
    with what it asks.
    """
    addresses = tuple(f"127.0.2.{number}" for number in range(1, 33))
    with (
        serving(targets=endless, max_connections=32, header_timeout=60.0) as served,
        connections(served, 32, addresses) as opened,
    ):
        for connection in opened:
            if first:
                connection.sendall(first)
                assert answered(connection) == 200
            connection.sendall(then)
        until(lambda: bool(first) or in_progress(served) == 32)
        time.sleep(seconds)
        assert_others_are_served(served)


def test_connection_that_cannot_be_made_gives_its_place_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where there is no memory for a connection, it is closed and takes no place from then on."""

    def without_memory(*_: object, **__: object) -> Connection:
        raise MemoryError

    with serving(max_connections=1) as served:
        assert served.server is not None
        with monkeypatch.context() as patch:
            patch.setattr(served.server._listener, "_connection", without_memory)
            with served.connect() as connection:
                closed_after(connection)
        assert served.metric("dshealthd_web_connections") == 0
        assert served.ask("/-/healthy")[0].status == 200


def test_client_that_does_not_read_is_closed() -> None:
    """A client that asks and does not take the answer does not keep its connection."""
    with (
        serving(large_snapshot(60_000), header_timeout=1.0) as served,
        served.connect() as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 8)
        until(lambda: served.metric(REFUSED, "response_timeout") == 1)
        until(lambda: served.metric("dshealthd_web_connections") == 0)


def test_answer_that_does_not_come_is_given_up() -> None:
    """A request that is not answered does not keep its connection."""
    with serving(targets=endless, header_timeout=0.5) as served, served.connect() as connection:
        started = time.monotonic()
        connection.sendall(UNFINISHED)
        assert closed_after(connection) <= 4.0
        assert time.monotonic() - started >= 2.0
        assert served.metric(REFUSED, "response_timeout") == 1


def test_server_closes_in_time_with_clients_connected() -> None:
    """Idle and half-sent connections do not hold the server up when it ends."""
    with serving() as served, contextlib.ExitStack() as stack:
        for data in (b"", b"GET", REQUEST):
            stack.enter_context(served.connect()).sendall(data)
        watch = Stopwatch(os.getpid())
    assert watch.seconds() < 3.0


def test_flood_from_many_addresses_takes_nothing_from_others() -> None:
    """3,000 stalling connections from 400 addresses, as any user of the machine can open them. The
    server keeps within its cap, and new connections of another client are answered at once, but for
    a few that the kernel refuses or has the client try again after 1 s (RFC 6298, 2.1).
    """
    latencies: list[float] = []
    descriptors: list[int] = []
    failed: list[str] = []
    with server_process() as (served, pid):
        assert served.ask("/metrics", source="127.0.0.2")[0].status == 200
        end = time.monotonic() + 200
        with flooding(served.port, 400) as tried:
            while (len(latencies) < 50 or tried() < 3000) and time.monotonic() < end:
                watch = Stopwatch(os.getpid(), pid)
                try:
                    assert served.ask("/metrics", source="127.0.0.2")[0].status == 200
                except (OSError, http.client.HTTPException) as error:
                    failed.append(repr(error))
                else:
                    latencies.append(watch.seconds())
                descriptors.append(len(os.listdir(f"/proc/{pid}/fd")))
                time.sleep(0.02)
            assert tried() >= 3000
    assert len(latencies) >= 50
    late = [seconds for seconds in latencies if seconds >= 1.0]
    assert len(failed) + len(late) <= 0.02 * len(latencies), (failed, late)
    assert max(descriptors) <= 100 + 128


def test_connections_leave_descriptors_to_the_collectors() -> None:
    """With 64 descriptors and 100 connections of many addresses the agent goes on answering, and
    keeps descriptors to open files with.
    """
    with server_process("--files", "64") as (served, pid):
        with connections(served, 100, tuple(f"127.0.2.{number}" for number in range(50))) as opened:
            for connection in opened:
                with contextlib.suppress(OSError):
                    connection.sendall(b"GET")
            time.sleep(0.2)
            assert len(os.listdir(f"/proc/{pid}/fd")) <= 40
            opened[0].close()
            until(lambda: len(os.listdir(f"/proc/{pid}/fd")) < 40)
            with contextlib.suppress(ConnectionError):
                assert served.ask("/metrics", source="127.0.0.2")[0].status == 200
        until(lambda: len(os.listdir(f"/proc/{pid}/fd")) < 20)
        _, body = served.ask("/metrics")
        assert re.search(rb'refused_total\{reason="connections"\} [1-9]', body)
        assert b'refused_total{reason="descriptors"} 0.0' in body


def test_lack_of_descriptors_does_not_spin() -> None:
    """While accept(2) finds no descriptor the server waits instead of spinning, and serves again
    when there is one.
    """
    with server_process() as (served, pid):
        assert served.ask("/-/healthy")[0].status == 200
        used = len(os.listdir(f"/proc/{pid}/fd"))
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used, before[1]))
        with connections(served, 8, ("127.0.0.3", "127.0.0.4")):
            started = cpu_seconds(pid)
            time.sleep(1.0)
            assert cpu_seconds(pid) - started < 0.2
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
            assert served.ask("/-/healthy")[0].status == 200
        until(lambda: b'refused_total{reason="descriptors"} 0.0' not in served.ask("/metrics")[1])
