"""The commands' HTTP client: queries the agent of this node, or another by its address."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dshealthd.core.address import listen_address

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from dshealthd.config import Config

TIMEOUT = 5.0
"""Seconds for each step of a call; short, as an agent answers from memory."""
MAX_ANSWER = 32 << 20
"""Most bytes of an answer; a node with many ranks sends about 2 MiB."""
_ANYWHERE = "0.0.0.0"  # noqa: S104 - the listen address of an agent without a configured one
_LOCAL = {_ANYWHERE: "127.0.0.1", "::": "::1"}


class Unreachable(Exception):
    """The agent gave no usable answer; the message has its address and the reason."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """Settings for agents that require TLS or a password."""

    tls: bool = False
    ca_file: Path | None = None
    """Certificate authorities to trust; None means the system's."""
    user: str = ""
    password_file: Path | None = None

    def headers(self) -> dict[str, str]:
        """Return the request headers. Raise OSError if the password cannot be read."""
        headers = {"Accept-Encoding": "identity"}
        if self.user:
            password = "" if self.password_file is None else self.password_file.read_text()
            credentials = f"{self.user}:{password.rstrip(chr(10))}".encode()
            headers["Authorization"] = f"Basic {base64.b64encode(credentials).decode()}"
        return headers

    def context(self) -> ssl.SSLContext | None:
        """Return the client's TLS context, None for plain HTTP.

        Raise OSError if the certificates cannot be read.
        """
        if not self.tls and self.ca_file is None:
            return None
        return ssl.create_default_context(
            cafile=None if self.ca_file is None else str(self.ca_file)
        )


class Client:
    """Queries one agent."""

    def __init__(
        self, host: str, port: int, headers: Mapping[str, str], tls: ssl.SSLContext | None
    ) -> None:
        """Prepare; the first call opens the connection."""
        self.host, self.port = host, port
        self._headers = headers
        self._tls = tls

    @property
    def url(self) -> str:
        """The agent's URL, for messages."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self._tls else 'http'}://{host}:{self.port}"

    def get(
        self, path: str, verify: Callable[[socket.socket], None] = lambda _connection: None
    ) -> bytes:
        """Return the body of the agent's answer, or raise Unreachable.

        `verify` receives the connection once there is an answer, and may raise.
        """
        connection = (
            http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT)
            if self._tls is None
            else http.client.HTTPSConnection(
                self.host, self.port, timeout=TIMEOUT, context=self._tls
            )
        )
        try:
            connection.connect()
            held = connection.sock  # the connection drops it if the other end will close
            connection.request("GET", path, headers=self._headers)
            answer = connection.getresponse()
            verify(held)
            body = answer.read(MAX_ANSWER + 1)
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            message = f"{self.url} does not answer: {error or type(error).__name__}"
            raise Unreachable(message) from error
        finally:
            connection.close()
        if answer.status != http.client.OK:
            hint = (
                " (--user and --password-file)" if answer.status == http.client.UNAUTHORIZED else ""
            )
            message = f"{self.url}{path}: {answer.status} {answer.reason}{hint}"
            raise Unreachable(message)
        if len(body) > MAX_ANSWER:
            message = f"{self.url}{path}: more than {MAX_ANSWER >> 20} MiB"
            raise Unreachable(message)
        return body

    def status(
        self, verify: Callable[[socket.socket], None] = lambda _connection: None
    ) -> Mapping[str, Any]:
        """Return the status document. Raise Unreachable, or what `verify` raises."""
        body = self.get("/api/v1/status", verify)
        try:
            document = json.loads(body)
        except ValueError as error:
            message = f"{self.url} sent invalid JSON: {error}"
            raise Unreachable(message) from error
        if not isinstance(document, dict):
            message = f"{self.url} did not send a status document"
            raise Unreachable(message)
        return document


def local(loaded: Config, access: Access) -> Client:
    """Return a client for this node's agent, at the configured address.

    With TLS in `web.config_file` it expects the certificate configured there, whatever names the
    certificate has: only this agent answers there. Raise OSError if a file cannot be read,
    ConfigError if the web config file is invalid.
    """
    host, port = listen_address(loaded.web.listen_address)
    tls = access.context()
    if tls is None and loaded.web.config_file is not None:
        tls = _own(loaded.web.config_file)
    return Client(_LOCAL.get(host or _ANYWHERE, host or ""), port, access.headers(), tls)


def _own(file: Path) -> ssl.SSLContext | None:
    """Return a TLS context that trusts the certificate in the agent's own web config file."""
    from dshealthd.web import config_file

    config = config_file.load(file)
    if config.tls is None:
        return None
    tls = ssl.create_default_context(cafile=config.files[1])
    tls.check_hostname = False
    tls.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return tls


def remote(loaded: Config, node: str, access: Access) -> Client:
    """Return a client for `NODE`, `NODE:PORT` or `[ADDRESS]:PORT`.

    The default port is that of this node's agent.
    Raise ValueError if the address is invalid, OSError if a file cannot be read.
    """
    _, port = listen_address(loaded.web.listen_address)
    bare = node.count(":") > 1 and not node.startswith("[")
    parts = urlsplit(f"//[{node}]" if bare else f"//{node}")
    if not parts.hostname or parts.path or parts.username is not None:
        message = f"{node} is not a node: give NODE, NODE:PORT or [ADDRESS]:PORT"
        raise ValueError(message)
    return Client(parts.hostname, parts.port or port, access.headers(), access.context())
