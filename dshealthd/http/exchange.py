"""One request of a command and its answer, which end by one deadline whatever the other side does.

A socket's own timeout restarts with every byte; here each step gets what is left of the time. That
needs no signal, so that commands can query many agents in threads.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import io
import os
import queue
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from dshealthd.core import background
from dshealthd.core.host import regular
from dshealthd.core.text import printable

AUTHORITIES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu
    "/etc/pki/tls/certs/ca-bundle.crt",  # RHEL, Fedora
    "/etc/ssl/ca-bundle.pem",  # SUSE
    "/etc/ssl/cert.pem",
)
"""Where distributions keep the authorities that a node trusts."""


class Unreachable(Exception):
    """No usable answer; the message has the address and the reason, safe for a terminal."""


class Rejected(Unreachable):
    """The answer has another status than 200."""

    def __init__(self, message: str, status: int, detail: str) -> None:
        """Keep the HTTP status, and the beginning of the text that explains it."""
        super().__init__(message)
        self.status = status
        self.detail = detail


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to send where."""

    host: str
    port: int
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    """POST if there is one, else GET."""
    tls: ssl.SSLContext | None = None
    verify: Callable[[socket.socket, float], None] = lambda _connection, _end: None
    """Receives the connection, and the end of the exchange on the monotonic clock, before a byte is
    sent. May raise Unreachable or OSError."""

    @property
    def url(self) -> str:
        """The URL of a request without its path, for messages."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.tls is None else 'https'}://{printable(host)}:{self.port}"


def verifying(authorities: str | os.PathLike[str] | None = None) -> ssl.SSLContext:
    """Return a client's TLS context that trusts these authorities, by default the node's.

    OpenSSL looks for those only where the distribution that built it keeps them. A chain that curl
    and Prometheus accept is accepted: Python has OpenSSL demand every extension of RFC 5280 since
    3.13, among them the key usage that `openssl req -x509` leaves out of an authority.
    """
    known = ssl.get_default_verify_paths()
    # Both are None where nothing is there, which typeshed does not say.
    if authorities is None and not any((known.cafile, known.capath)):
        authorities = next((file for file in AUTHORITIES if os.path.isfile(file)), None)
    context = ssl.create_default_context(cafile=authorities and regular(authorities))
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def exchange(request: Request, seconds: float, largest: int) -> bytes:
    """Return the body of the answer, at most `largest` bytes. Raise Unreachable; Rejected if the
    status is not 200, as for a redirection, which is not followed.

    All of it, from the name's lookup to the last byte, takes at most `seconds`.
    """
    end = time.monotonic() + seconds
    try:
        with _connected(request.host, request.port, end) as connection:
            request.verify(connection, end)
            return _answer(request, connection, end, largest)
    except TimeoutError as error:
        raise Unreachable(f"{request.url} does not answer within {seconds:g} s") from error
    # ValueError: bad names
    except (OSError, http.client.HTTPException, ValueError, ArithmeticError) as error:
        raise Unreachable(f"{request.url} does not answer: {_reason(error, request)}") from error


def _reason(error: Exception, request: Request) -> str:
    """Return why there is no answer, and which scheme may be the right one."""
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return "it does not speak TLS"
    words = isinstance(error, OSError) and not isinstance(error, ssl.SSLError) and error.strerror
    reason = printable(words or str(error)) or type(error).__name__
    if isinstance(error, http.client.RemoteDisconnected) and request.tls is None:
        return f"{reason} (it may serve TLS only)"
    return reason


def _answer(request: Request, connection: socket.socket, end: float, largest: int) -> bytes:
    if request.tls is not None:
        connection.settimeout(_left(end))  # which is that of the whole handshake
        connection = request.tls.wrap_socket(connection, server_hostname=request.host)
    with connection:
        client = http.client.HTTPConnection(request.host, request.port)
        client.sock = _TimedSocket(connection, end)
        method = "GET" if request.body is None else "POST"
        headers = {"Accept-Encoding": "identity", "Connection": "close", **request.headers}
        client.request(method, request.path, body=request.body, headers=headers)
        answer = client.getresponse()
        if answer.status != HTTPStatus.OK:
            reason = printable(answer.reason)
            message = f"{request.url}{request.path}: {answer.status} {reason}".rstrip()
            raise Rejected(message, answer.status, _beginning(answer))
        body = answer.read(largest + 1)
        if len(body) > largest:
            raise Unreachable(f"{request.url}{request.path}: more than {largest >> 20} MiB")
        if answer.length:
            raise http.client.HTTPException(f"the answer ended {answer.length} bytes early")
        return body


def _beginning(answer: http.client.HTTPResponse) -> str:
    """Return the beginning of the text of a rejected request's answer; empty if none comes."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        return printable(answer.read(300).decode(errors="replace").strip())
    return ""


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


class _TimedSocket:
    """What `http.client` uses of a socket, with each call limited by the end of the exchange."""

    def __init__(self, connection: socket.socket, end: float) -> None:
        self._connection = connection
        self._end = end

    def sendall(self, data: bytes) -> None:
        self._connection.settimeout(_left(self._end))
        self._connection.sendall(data)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedReader(self._connection, self._end))

    def close(self) -> None:
        """Leave the connection to who opened it: its reader outlives this object."""


class _TimedReader(io.RawIOBase):
    def __init__(self, connection: socket.socket, end: float) -> None:
        self._connection = connection
        self._end = end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._connection.settimeout(_left(self._end))
        return self._connection.recv_into(buffer)


def _connected(host: str, port: int, end: float) -> socket.socket:
    """Return a connection to the first address of the host that accepts one."""
    problem: OSError = OSError("the name has no address")
    addresses = _addresses(host, port, end)
    for tried, (family, kind, protocol, _, address) in enumerate(addresses):
        connection = socket.socket(family, kind, protocol)
        try:
            # A share of the time, so that an address that drops packets leaves some to the next.
            connection.settimeout(_left(end) / (len(addresses) - tried))
            connection.connect(address)
        except OSError as error:
            connection.close()
            problem = error
        else:
            return connection
    raise problem


def _addresses(host: str, port: int, end: float) -> list[Any]:
    """Return the host's addresses as `getaddrinfo` does.

    A silent name server makes that block for long, and nothing interrupts it, so it runs in a
    daemon thread; an address in numbers is not looked up.
    """
    look_up = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        return look_up(flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass
    found: queue.SimpleQueue[list[Any] | OSError | UnicodeError] = queue.SimpleQueue()

    def run() -> None:
        try:
            found.put(look_up())
        except (OSError, UnicodeError) as error:
            found.put(error)

    try:
        background.start(run, "the name's lookup")
        addresses = found.get(timeout=_left(end))
    except queue.Empty as error:
        raise TimeoutError from error
    if isinstance(addresses, Exception):
        raise addresses
    return addresses
