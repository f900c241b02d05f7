"""One request and its answer end by one deadline, whatever the other side does."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dshealthd.http import exchange as module
from dshealthd.http.exchange import Rejected, Request, Unreachable, exchange, verifying
from tests.http.impostors import answer, saying, serving
from tests.stopwatch import Stopwatch
from tests.web import certificates

SECONDS = 1.0


def request(port: int, host: str = "127.0.0.1") -> Request:
    """Return a request for the root of a local server."""
    return Request(host=host, port=port, path="/")


def silent(connection: socket.socket, _request: bytes) -> None:
    """Accept, and say nothing."""
    connection.recv(1)


def endless(head: bytes, piece: bytes) -> Callable[[socket.socket, bytes], None]:
    """Return what sends `head` and then pieces, each within any timeout of a single read."""

    def talk(connection: socket.socket, _request: bytes) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(piece)
            time.sleep(0.05)

    return talk


SLOW = {
    "silent": silent,
    "body": endless(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b" "),
    "headers": endless(b"HTTP/1.1 200 OK\r\n", b"X: a\r\n"),
    "continue": endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
}


@pytest.mark.parametrize("talk", SLOW.values(), ids=SLOW)
def test_60_a_slow_answer_ends_in_time(talk: Callable[[socket.socket, bytes], object]) -> None:
    """A byte now and then does not extend the deadline, and neither does it in a thread."""
    problems: list[str] = []

    def ask(port: int) -> None:
        try:
            exchange(request(port), SECONDS, 1 << 20)
        except Unreachable as error:
            problems.append(str(error))

    with serving(talk) as port:
        watch = Stopwatch()
        thread = threading.Thread(target=ask, args=(port,))
        thread.start()
        thread.join(60)
        assert watch.seconds() < SECONDS + 5
    assert problems == [f"http://127.0.0.1:{port} does not answer within 1 s"]


def test_a_stalled_handshake_ends_in_time() -> None:
    """A server that accepts TLS and says nothing is given up at the same deadline."""
    with serving(silent) as port:
        asked = Request(host="127.0.0.1", port=port, path="/", tls=ssl.create_default_context())
        watch = Stopwatch()
        with pytest.raises(Unreachable, match="does not answer within 1 s"):
            exchange(asked, SECONDS, 1 << 20)
        assert watch.seconds() < SECONDS + 5


def test_silent_name_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name's lookup that blocks is left behind at the deadline."""
    release = threading.Event()

    def look_up(*_: object, flags: int = 0, **__: object) -> list[object]:
        if flags:
            raise socket.gaierror(socket.EAI_NONAME, "is a name")
        release.wait(60)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    try:
        watch = Stopwatch()
        with pytest.raises(Unreachable, match="does not answer within 1 s"):
            exchange(request(1, "n1.example"), SECONDS, 1 << 20)
        assert watch.seconds() < SECONDS + 5
    finally:
        release.set()


@pytest.mark.parametrize("host", ["a" * 70, "n1..x", "n\u0000", "nobody.invalid"])
def test_names_that_are_none(host: str) -> None:
    """A name that cannot be looked up is a problem of that agent, not an exception."""
    with pytest.raises(Unreachable, match="does not answer"):
        exchange(request(1, host), 30, 1 << 20)


def test_an_address_that_is_dead_leaves_time_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a name's addresses the first that accepts is asked."""
    with serving(saying("ok")) as port:
        stream = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        found = [(*stream, ("127.0.0.1", 1)), (*stream, ("127.0.0.1", port))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        assert exchange(request(port, "n1"), 30, 1 << 20) == b"ok"


@pytest.mark.parametrize(("sent", "word"), [
    (answer("x" * 1001), "more than"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nshort", "ended 94 bytes early"),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "does not answer"),
    (b"\x1b]0;OWNED\x07\r\n\r\n", r"does not answer: \\u001b\]0;OWNED"),
    (b"", "does not answer"),
    (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n", "more than 100 headers"),
], ids=["large", "short", "bad chunk", "terminal", "nothing", "headers"])  # fmt: skip
def test_60_answers_that_are_none(sent: bytes, word: str) -> None:
    """An answer that is too large, cut off or no HTTP is a reason, safe for a terminal."""
    with (
        serving(lambda connection, _: connection.sendall(sent)) as port,
        pytest.raises(Unreachable, match=word) as caught,
    ):
        exchange(request(port), 30, 1000)
    assert str(caught.value).isprintable()


def test_redirections_are_not_followed() -> None:
    """An answer that names another address leads nowhere."""
    asked: list[bytes] = []
    with serving(lambda _, data: asked.append(data)) as other:

        def redirect(connection: socket.socket, _: bytes) -> None:
            to = f"HTTP/1.1 302 \x1b[31mFound\r\nLocation: http://127.0.0.1:{other}/\r\n\r\n"
            connection.sendall(to.encode())

        with serving(redirect) as port, pytest.raises(Rejected) as caught:
            exchange(request(port), 30, 1000)
    assert (caught.value.status, asked) == (302, [])
    assert str(caught.value).endswith(r"302 \u001b[31mFound")


_PEAK = """
import resource, socket, sys
from dshealthd.http.client import Client
from dshealthd.http.exchange import Request, Unreachable
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    Client(Request(host="127.0.0.1", port=int(sys.argv[1]), path="/"), 60).status()
except Unreachable as error:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, error)
"""


@pytest.mark.parametrize("size", [32 << 20, 8 << 20])
def test_60_memory_of_a_hostile_answer_is_bounded(size: int) -> None:
    """32 MiB of empty lists took 800 MiB; the largest answer that is read takes a tenth of that."""
    body = b'{"x":[' + b"[]," * ((size - 20) // 3) + b"[]]}"
    with serving(lambda connection, _: connection.sendall(answer(body))) as port:
        command = [sys.executable, "-c", _PEAK, str(port)]
        said = subprocess.check_output(command, text=True, timeout=120)
    peak, _, reason = said.partition(" ")
    assert int(peak) < 80 << 10, reason
    assert "too large" in reason or "more than 8 MiB" in reason


def test_authorities_are_those_of_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where OpenSSL was built for another distribution, the node's own bundle is trusted."""
    certificates.authority(tmp_path, "ca")
    bundle = str(tmp_path / "ca.pem")
    monkeypatch.setattr(module, "AUTHORITIES", (str(tmp_path / "absent"), bundle))
    nowhere = ssl.DefaultVerifyPaths("", "", "", "", "", "")
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: nowhere)
    assert len(verifying().get_ca_certs()) == 1
    monkeypatch.setattr(module, "AUTHORITIES", (str(tmp_path),))
    for known in ({"cafile": "/known"}, {"capath": "/known"}):
        found = nowhere._replace(**known)
        monkeypatch.setattr(ssl, "get_default_verify_paths", lambda found=found: found)
        verifying()  # OpenSSL's own place: none of the others is read
    with pytest.raises(FileNotFoundError):
        verifying(tmp_path / "absent")
