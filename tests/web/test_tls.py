"""TLS with real handshakes: versions, client certificates, stalls, and certificates that are
replaced.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from pathlib import Path

import pytest

from dshealthd.config.config import Web
from dshealthd.core.sockets import reset_on_close
from dshealthd.http.connection import Connection
from dshealthd.http.exchange import verifying
from tests.leftovers import without_search
from tests.stopwatch import Stopwatch
from tests.waiting import until
from tests.web.serving import Served, closed_after, serving

PLACES = Web().max_connections_per_address
REFUSED = "dshealthd_web_connections_refused_total"
TLS = "tls_server_config:\n  cert_file: {keys}/{name}.pem\n  key_file: {keys}/{name}.key\n"
MUTUAL = "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: {keys}/ca.pem\n"


def configured(directory: Path, keys: Path, text: str) -> Path:
    """Return a web config file in a directory of its own."""
    place = directory / "web.yml"
    place.write_text((TLS + text).format(keys=keys, name="server"), encoding="utf-8")
    return place


def client(keys: Path, name: str | None = None) -> ssl.SSLContext:
    """Return a client's context that trusts the authority and shows a certificate."""
    context = verifying(keys / "ca.pem")
    if name:
        context.load_cert_chain(keys / f"{name}.pem", keys / f"{name}.key")
    return context


def is_served(served: Served, tls: ssl.SSLContext) -> bool:
    """Tell whether a client gets an answer."""
    served.tls = tls
    try:
        return served.ask("/-/healthy")[0].status == 200
    except (ssl.SSLError, ConnectionError):
        return False


def serial_number(served: Served, keys: Path) -> object:
    """Return the serial number of the certificate that the server shows."""
    served.tls = client(keys)
    with served.connect() as connection:
        assert isinstance(connection, ssl.SSLSocket)
        certificate = connection.getpeercert()
        assert certificate is not None
        return certificate["serialNumber"]


def test_served_by_tls_alone(tmp_path: Path, keys: Path) -> None:
    """With a certificate the server speaks TLS 1.3, tells its address so, and gives no answer in
    clear.
    """
    with serving(config_file=configured(tmp_path, keys, "")) as served:
        assert served.send(b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n").find(b"200 OK") == -1
        assert is_served(served, client(keys))
        with served.connect() as connection:
            assert isinstance(connection, ssl.SSLSocket)
            assert connection.version() == "TLSv1.3"
        assert served.server is not None
        assert served.server.url("node").startswith("https://127.0.0.1:")
        until(lambda: served.metric("dshealthd_web_connections") == 0)
        assert served.metric(REFUSED, "tls_handshake") == 1


def test_versions_suites_and_curve_are_as_configured(tmp_path: Path, keys: Path) -> None:
    """Bounds of the version, cipher suites and the curve are those of the file."""
    text = (
        "  max_version: TLS12\n  cipher_suites: "
        "[TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256]\n  curve_preferences: [CurveP384]\n"
    )
    with serving(config_file=configured(tmp_path, keys, text)) as served:
        served.tls = client(keys)
        with served.connect() as connection:
            assert isinstance(connection, ssl.SSLSocket)
            assert connection.version() == "TLSv1.2"
            assert connection.cipher() == ("ECDHE-ECDSA-CHACHA20-POLY1305", "TLSv1.2", 256)
        other = client(keys)
        other.set_ecdh_curve("prime256v1")
        assert not is_served(served, other)


@pytest.mark.parametrize("policy", ["RequireAndVerifyClientCert", "VerifyClientCertIfGiven"])
@pytest.mark.parametrize("name", [None, "stranger", "scraper"])
def test_client_certificate_is_verified(
    tmp_path: Path, keys: Path, name: str | None, policy: str
) -> None:
    """Only a certificate from the configured authority is let in; with VerifyClientCertIfGiven a
    client may have none, but not a bad one.
    """
    text = MUTUAL.replace("RequireAndVerifyClientCert", policy)
    allowed = name == "scraper" or (name is None and policy == "VerifyClientCertIfGiven")
    with serving(config_file=configured(tmp_path, keys, text)) as served:
        assert is_served(served, client(keys, name)) is allowed


@pytest.mark.parametrize(
    ("names", "name", "allowed"),
    [
        ("scraper.example", "scraper", True),
        ("spiffe://example/scraper", "scraper", True),
        ("other.example, Scraper.example", "scraper", False),
        ("192.0.2.7", "address", True),
        ('"2001:db8:0::7"', "address", True),
        ("192.0.2.70", "address", False),
    ],
)
def test_client_has_one_of_the_allowed_names(
    tmp_path: Path, keys: Path, names: str, name: str, *, allowed: bool
) -> None:
    """A client's certificate must have one of the allowed names, exactly. Without, no request of it
    is read.
    """
    with serving(
        config_file=configured(tmp_path, keys, f"{MUTUAL}  client_allowed_sans: [{names}]\n")
    ) as served:
        assert is_served(served, client(keys, name)) is allowed
        assert served.metric(REFUSED, "client_certificate") == (0 if allowed else 1)
        assert served.metric("dshealthd_web_requests_total", "/-/healthy", "200") == (
            1 if allowed else 0
        )
        until(lambda: served.metric("dshealthd_web_connections") == 0)


@pytest.mark.parametrize(
    "start", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["nothing", "half a hello"]
)
def test_stalled_handshake_ends(tmp_path: Path, keys: Path, start: bytes) -> None:
    """A handshake gets as long as headers get. A stalled one is counted, and takes a place under
    the caps meanwhile.
    """
    with (
        serving(config_file=configured(tmp_path, keys, ""), header_timeout=1.5) as served,
        served.connect() as connection,
    ):
        connection.sendall(start)
        until(lambda: served.metric("dshealthd_web_connections") == 1)
        assert closed_after(connection) < 2.5
        until(lambda: served.metric("dshealthd_web_connections") == 0)
        assert served.metric(REFUSED, "tls_handshake") == 1


def test_stalled_handshakes_do_not_shut_out_a_client(tmp_path: Path, keys: Path) -> None:
    """Connections that never begin or end their handshake give way, and are closed."""
    config = configured(tmp_path, keys, "")
    with (
        serving(config_file=config, max_connections=8, header_timeout=60.0) as served,
        contextlib.ExitStack() as stack,
    ):
        stalled = [
            stack.enter_context(served.connect(f"127.0.2.{number}")) for number in range(1, 9)
        ]
        for connection in stalled[4:]:
            connection.sendall(b"\x16\x03\x01\x02\x00\x01")
        until(lambda: served.metric("dshealthd_web_connections") == 8)
        assert is_served(served, client(keys))
        assert closed_after(stalled[0]) < 2.5
        assert served.metric(REFUSED, "replaced") == 1


def clear_text(served: Served, _keys: Path) -> None:
    """Send a request without TLS."""
    with served.connect() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        closed_after(connection)


def reset(served: Served, _keys: Path) -> None:
    """Say nothing, and close with a reset."""
    with served.connect() as connection:
        reset_on_close(connection)


def distrust(served: Served, _keys: Path) -> None:
    """Refuse the server's certificate."""
    with (
        contextlib.suppress(ssl.SSLError),
        served.connect() as connection,
        ssl.create_default_context().wrap_socket(connection, server_hostname="localhost"),
    ):
        pass


def flood(served: Served, _keys: Path) -> None:
    """Open silent connections until as many as an address may have were replaced. A server that is
    behind refuses some of them, at times before they know that they are open.
    """
    enough = served.metric(REFUSED, "replaced") + PLACES
    with contextlib.ExitStack() as stack:

        def more() -> bool:
            for _ in range(PLACES):
                with contextlib.suppress(ConnectionError):
                    stack.enter_context(served.connect())
            return served.metric(REFUSED, "replaced") >= enough

        until(more)


def no_certificate(served: Served, keys: Path) -> None:
    """Show no certificate where one is required."""
    is_served(served, client(keys))
    served.tls = None


@pytest.mark.parametrize("way", [clear_text, reset, distrust, flood, no_certificate])
def test_nothing_is_left_of_failed_handshakes(
    tmp_path: Path, keys: Path, way: Callable[[Served, Path], None]
) -> None:
    """A flood of them must not make the agent grow: each takes 200 KiB until it is freed."""
    with (
        serving(config_file=configured(tmp_path, keys, MUTUAL)) as served,
        without_search(Connection, SSLProtocol) as gone,
    ):
        for _ in range(5):
            way(served, keys)
        until(gone)


def test_a_lost_connection_can_be_evicted(
    tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that is lost gives way at once: asyncio's TLS tells it a turn of the loop later.
    Its socket is gone by then, and the new connection was dropped.
    """
    problems: list[AttributeError] = []
    lost = SSLProtocol.connection_lost

    def lost_and_evicted(protocol: SSLProtocol, error: Exception | None) -> None:
        lost(protocol, error)
        assert served.server is not None
        try:
            served.server._gate.close_silent()
        except AttributeError as problem:  # shown by the test, not by the loop
            problems.append(problem)

    with serving(config_file=configured(tmp_path, keys, "")) as served:
        monkeypatch.setattr(SSLProtocol, "connection_lost", lost_and_evicted)
        served.tls = client(keys)
        with served.connect() as connection:
            until(lambda: served.metric("dshealthd_web_connections") == 1)
            reset_on_close(connection)
        until(lambda: served.metric("dshealthd_web_connections") == 0)
        assert served.server is not None
        gate = served.server._gate
        until(lambda: gate.closing == 0)
        assert not problems


def test_headers_are_timed_inside_tls(tmp_path: Path, keys: Path) -> None:
    """After its handshake a client's headers are timed as without TLS."""
    with serving(config_file=configured(tmp_path, keys, ""), header_timeout=1.5) as served:
        served.tls = client(keys)
        with served.connect() as connection:
            connection.sendall(b"GET / HTTP")
            watch = Stopwatch(os.getpid())
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                connection.recv(1)
            assert watch.seconds() < 2.5
        assert served.metric(REFUSED, "header_timeout") == 1


def test_replaced_certificate_is_shown(tmp_path: Path, keys: Path) -> None:
    """New connections get the certificate that is there now. A half-written one changes nothing and
    is counted once.
    """
    for suffix in ("pem", "key"):
        (tmp_path / f"node.{suffix}").write_bytes((keys / f"server.{suffix}").read_bytes())
    config = tmp_path / "web.yml"
    config.write_text(TLS.format(keys=tmp_path, name="node"), encoding="utf-8")
    with serving(config_file=config) as served:
        first = serial_number(served, keys)
        new = (keys / "server2.pem").read_bytes()
        (tmp_path / "node.pem").write_bytes(new[:200])

        def is_noticed() -> bool:
            assert serial_number(served, keys) == first
            return served.metric("dshealthd_web_config_last_reload_successful") == 0

        until(is_noticed)
        assert served.metric("dshealthd_web_config_reload_failures_total") == 1
        for name, content in (("node.key", (keys / "server2.key").read_bytes()), ("node.pem", new)):
            (tmp_path / "new").write_bytes(content)
            os.replace(tmp_path / "new", tmp_path / name)
        until(lambda: serial_number(served, keys) != first)
        assert served.metric("dshealthd_web_config_last_reload_successful") == 1


def test_a_key_that_everybody_can_read_is_told(
    tmp_path: Path, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It works, as such set-ups exist, and the log says what is wrong with it."""
    place = configured(tmp_path, keys, "")
    before = (keys / "server.key").stat().st_mode
    try:
        (keys / "server.key").chmod(0o644)
        with serving(config_file=place) as served:
            assert is_served(served, client(keys))
        assert "can be read by every user of this node (mode 644)" in caplog.text
        caplog.clear()
        (keys / "server.key").chmod(0o640)
        with serving(config_file=place):
            assert "can be read by every user" not in caplog.text
    finally:
        (keys / "server.key").chmod(before & 0o777)
