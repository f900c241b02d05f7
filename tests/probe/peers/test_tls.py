"""The peer API with certificates: exactly the node's own name, valid now, TLS 1.3."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from typing import TYPE_CHECKING, Any

import pytest

from dshealthd.http.connection import Connection
from dshealthd.probe.observation import Outcome
from dshealthd.probe.options import PeerOptions
from dshealthd.probe.peers import pool
from dshealthd.probe.peers.link import Link
from dshealthd.probe.peers.protocol import PeerError, RequestClaim, certificate_names
from tests.leftovers import without_search
from tests.probe.peering import (
    KEY,
    OTHER_KEY,
    PATIENT,
    calling,
    fails,
    impersonating,
    listening,
    metric,
    ping,
    request,
    secret,
    talking,
    tls,
    until,
    until_closed,
)
from tests.probe.peers.test_calls import BODY
from tests.stopwatch import Stopwatch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


async def test_call_with_certificates(issued: Path) -> None:
    """Nodes with good certificates talk, with one handshake for many calls and no nonces."""
    async with talking(tls(issued, "b"), tls(issued, "a")) as (node, client):
        for _ in range(3):
            await ping(client)
        assert metric(client, "client_connections_opened_total") == 1
        assert node.metric("requests_total", "echo", "ok") == 3


@pytest.mark.parametrize(
    ("server", "client", "reason", "counted"),
    [
        ("c", "a", "wrong_certificate", None),
        ("wildcard", "a", "wrong_certificate", None),
        ("b-stranger", "a", "certificate_untrusted", "tls_handshake"),
        ("b-expired", "a", "certificate_expired", "tls_handshake"),
        ("b-early", "a", "certificate_not_yet_valid", "tls_handshake"),
        ("b", "c", "rejected", "certificate"),
        ("b", "wildcard", "rejected", "certificate"),
        ("b", "a-stranger", "own_certificate_untrusted", "tls_handshake"),
        ("b", "a-expired", "own_certificate_expired", "tls_handshake"),
        ("b", "a-early", "own_certificate_not_yet_valid", "tls_handshake"),
    ],
)
async def test_wrong_certificates(
    issued: Path, server: str, client: str, reason: str, counted: str | None
) -> None:
    """A wrong certificate ends the call on whichever side it is wrong, which says how."""
    async with talking(tls(issued, server), tls(issued, client)) as (node, caller):
        for _ in range(3):
            await fails(ping(caller), Outcome.UNAUTHORIZED, reason)
        if counted == "certificate":
            assert node.refused("certificate") == 3
        elif counted is not None:
            await until(lambda: node.metric("connections_refused_total", counted) == 3)
        await until(lambda: node.metric("connections") == 0)


@pytest.mark.parametrize(
    ("server", "client"), [("b-stranger", "a"), ("b", "a-expired"), ("c", "a")]
)
async def test_nothing_is_left_of_failed_handshakes(issued: Path, server: str, client: str) -> None:
    """Neither end keeps its 200 KiB until cycles are searched for."""
    async with talking(tls(issued, server), tls(issued, client)) as (_, caller):
        with without_search(SSLProtocol, Link, Connection) as gone:
            for _ in range(3):
                with contextlib.suppress(PeerError):
                    await ping(caller)
            await until(gone)


async def test_other_authorities(issued: Path, tmp_path: Path) -> None:
    """The caller knows where only the receiver finds fault with its certificate."""
    both = tmp_path / "both.pem"
    both.write_text(
        (issued / "ca.pem").read_text(encoding="ascii")
        + (issued / "other.pem").read_text(encoding="ascii"),
        encoding="ascii",
    )
    options = PeerOptions(**{**vars(tls(issued, "a-stranger")), "tls_ca_file": both})
    async with talking(tls(issued, "b"), options) as (_, client):
        await fails(
            ping(client),
            Outcome.UNAUTHORIZED,
            "closed_after_handshake",
        )


async def test_tls_1_2_client(issued: Path) -> None:
    """A client without TLS 1.3 is refused in the handshake, although its certificate is good."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(issued / "ca.pem")
    context.load_cert_chain(issued / "a.pem", issued / "a.key")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    async with listening(tls(issued, "b")) as node:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("127.0.0.1", node.port, ssl=context)
        await until(lambda: node.metric("connections_refused_total", "tls_handshake") == 1)


async def test_no_certificate(issued: Path) -> None:
    """A client without a certificate gets no answer to anything."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(issued / "ca.pem")
    async with listening(tls(issued, "b")) as node:
        reader, writer = await asyncio.open_connection("127.0.0.1", node.port, ssl=context)
        writer.write(request(RequestClaim("a", "b"), BODY))
        assert await until_closed(reader, PATIENT) == b""
        writer.transport.abort()
        await until(lambda: node.metric("connections_refused_total", "tls_handshake") == 1)


async def test_client_that_speaks_no_tls(issued: Path, tmp_path: Path) -> None:
    """A client without a certificate is refused; one with it finds a listener without TLS."""
    plain = PeerOptions(listen_address="127.0.0.1:0", key_file=secret(tmp_path, "key", KEY))
    async with talking(tls(issued, "b"), plain) as (_, client):
        with pytest.raises(Exception, match=r"closed|reset|bad_answer"):
            await ping(client)
    async with talking(plain, tls(issued, "a")) as (_, client):
        await fails(ping(client), Outcome.UNAUTHORIZED, "tls")


async def test_key_and_certificate(issued: Path, tmp_path: Path) -> None:
    """Where both are configured both are asked for."""

    def both(name: str, key: str) -> PeerOptions:
        return PeerOptions(
            **{
                **vars(tls(issued, name)),
                "key_file": secret(tmp_path, f"key-{name}-{key[0]}", key),
            }
        )

    async with listening(both("b", KEY)) as node:
        async with calling(both("a", KEY), node.port) as client:
            await ping(client)
        async with calling(both("a", OTHER_KEY), node.port) as client:
            await fails(ping(client), Outcome.UNAUTHORIZED, "rejected")
        async with calling(both("c", KEY), node.port) as client:
            await fails(ping(client), Outcome.UNAUTHORIZED, "rejected")
        async with calling(tls(issued, "a"), node.port) as client:
            await fails(ping(client), Outcome.UNAUTHORIZED, "rejected")
        assert (node.refused("key"), node.refused("certificate")) == (2, 1)


async def test_handshake_that_stalls(issued: Path) -> None:
    """A client that stalls in the handshake is closed and counted; a server is a hang."""
    async with listening(tls(issued, "b", header_timeout=0.3)) as node:
        reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
        writer.write(b"\x16\x03\x01")
        watch = Stopwatch()
        assert await until_closed(reader, PATIENT) == b""
        assert watch.seconds() < 1.0
        writer.transport.abort()
        await until(lambda: node.metric("connections_refused_total", "tls_handshake") == 1)

    async def silent(_requests: AsyncIterator[bytes], _writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with impersonating(silent) as port, calling(tls(issued, "a"), port) as client:
        await fails(ping(client, 1.0), Outcome.HUNG, "tls_handshake")


def test_only_names_count() -> None:
    """DNS names and URIs are names; addresses, e-mail addresses and the subject are not."""
    certificate = {
        "subject": ((("commonName", "a"),),),
        "subjectAltName": (
            ("DNS", "b"),
            ("URI", "c:d"),
            ("IP Address", "192.0.2.1"),
            ("email", "e"),
        ),
    }
    assert certificate_names(certificate) == {"b", "c:d"}
    assert certificate_names({}) == set()


async def test_call_that_is_given_up_as_the_handshake_ends(
    issued: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket stays its transport's: no other connection gets its number while that reads it. A
    deadline that passes in the turn of the loop in which the handshake ends is such a case; the
    next connection then failed with "File descriptor … is used by transport".
    """
    calls: list[asyncio.Task[Any]] = []

    class Late(Link):
        """A link whose call is given up in the moment in which it is made."""

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            calls[-1].cancel()

    monkeypatch.setattr(pool, "Link", Late)
    loop = asyncio.get_running_loop()
    async with talking(tls(issued, "b"), tls(issued, "a")) as (node, client):
        others: list[socket.socket] = []
        for _ in range(5):
            calls.append(asyncio.create_task(ping(client)))
            with pytest.raises(asyncio.CancelledError):
                await calls[-1]
            other = socket.socket()
            others.append(other)
            other.settimeout(0)
            await loop.sock_connect(other, ("127.0.0.1", node.port))
        for other in others:
            other.close()


async def test_lost_link_is_not_used_again(issued: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asyncio's TLS tells a link that it is lost a turn of the loop later. A call of that very turn
    takes another one; it failed with a TypeError.
    """
    made: list[Link] = []
    usable: list[bool] = []
    lost = SSLProtocol.connection_lost

    class Known(Link):
        """A link that the test knows."""

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            made.append(self)

    def lost_and_asked(protocol: SSLProtocol, error: Exception | None) -> None:
        is_link = protocol._app_protocol is made[0]
        lost(protocol, error)
        if is_link:
            usable.append(made[0].usable())

    monkeypatch.setattr(pool, "Link", Known)
    async with talking(tls(issued, "b"), tls(issued, "a")) as (node, client):
        await ping(client)
        monkeypatch.setattr(SSLProtocol, "connection_lost", lost_and_asked)
        gate = node.server._gate
        gate.evict(gate._longest_idle("127.0.0.1"))  # with a reset
        await until(lambda: bool(usable))
        assert usable == [False]
