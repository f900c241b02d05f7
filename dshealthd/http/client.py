"""The commands' HTTP client: queries the agent of this node, or another by its address.

It is the only one. What answers on the agent's port of this node is identified before anything is
sent to it, and no answer names an address that receives credentials.
"""

from __future__ import annotations

import base64
import dataclasses
import ipaddress
import json
import os
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dshealthd.core import documents
from dshealthd.core.host import read_named, regular
from dshealthd.core.sockets import listen_address
from dshealthd.http import document
from dshealthd.http.document import MAX_DOCUMENT, DocumentError
from dshealthd.http.exchange import Rejected, Request, Unreachable, exchange, verifying
from dshealthd.linux.peer_user import peer_uid

if TYPE_CHECKING:
    import socket

    from dshealthd.config.config import Config

_USER = "dshealthd"
"""The agent's user where it does not run as root."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.1
"""Seconds between two looks at whether the connection is accepted, doubled each time: an idle agent
accepts within a millisecond, a starved one takes long."""
_SHARE = 5
"""A look that is slow, because the kernel's tables must be read, waits so many times its cost."""
UNAUTHORIZED = "--user and --password-file"
"""What to do about a status of 401."""
WRONG = "the user or the password is wrong"
"""What a status of 401 means where both were sent."""
TIMEOUT = 5.0
"""Seconds for a whole exchange; short, as an agent answers from memory."""


class Impostor(Unreachable):
    """Another user's process, or none that is known, answers on the agent's port."""


def identify(connection: socket.socket, end: float) -> None:
    """Wait until the local agent has accepted the connection; Impostor if a user's process has.

    Only an agent of root, of this process's user or of the user `dshealthd` is trusted. `end` is on
    the monotonic clock. Call this before sending anything. Raise OSError if the kernel does not
    tell who is at the other end.
    """
    pause = _FIRST_PAUSE
    while True:
        begun = time.monotonic()
        uid = peer_uid(connection)
        now = time.monotonic()
        if uid is not None or now > end:
            break
        time.sleep(min(max(pause, _SHARE * (now - begun)), max(0.0, end - now)))
        pause = min(2 * pause, _LONGEST_PAUSE)
    if uid is None:
        raise Impostor("no process of this machine has accepted the connection to the agent's port")
    if uid not in _trusted_users():
        message = f"the agent's port is answered by a process of uid {uid}, which is not trusted"
        raise Impostor(message)


def _trusted_users() -> set[int]:
    """Return the users whose agent is trusted.

    Reads only `/etc/passwd`: a name service can hang, and the package creates its user there.
    """
    users = {0, os.geteuid()}
    with open("/etc/passwd", encoding="utf-8", errors="replace") as lines:
        users.update(int(line.split(":")[2]) for line in lines if line.startswith(f"{_USER}:"))
    return users


@dataclass(frozen=True, kw_only=True)
class Access:
    """Settings for agents that require TLS, a password or a client certificate."""

    tls: bool = False
    ca_file: Path | None = None
    """Certificate authorities to trust; None means the system's."""
    user: str = ""
    password_file: Path | None = None
    cert_file: Path | None = None
    """Client certificate, which may include its key."""
    key_file: Path | None = None

    def without_credentials(self) -> Access:
        """Return the same access without what identifies this user."""
        return Access(tls=self.tls, ca_file=self.ca_file)

    def headers(self) -> dict[str, str]:
        """Return the request headers. Raise OSError if the password cannot be read."""
        if not self.user:
            if self.password_file is not None:
                raise ValueError(f"the password in {self.password_file} needs a user name")
            return {}
        password = "" if self.password_file is None else read_named(self.password_file).decode()
        credentials = f"{self.user}:{password.rstrip(chr(10))}".encode()
        return {"Authorization": f"Basic {base64.b64encode(credentials).decode()}"}

    def context(self) -> ssl.SSLContext | None:
        """Return the client's TLS context, None for plain HTTP.

        Raise OSError if the certificates cannot be read.
        """
        if not self.tls and self.ca_file is None:
            return None
        try:
            context = verifying(self.ca_file)
        except OSError as error:  # ssl.SSLError is one, and neither names the file
            message = f"{self.ca_file} cannot be used: {error.strerror or error}"
            raise OSError(message) from error
        return self._identified(context)

    def unverified_context(self) -> ssl.SSLContext:
        """Return a TLS context for an agent that the kernel has identified, which is stronger proof
        than a certificate. Raise OSError as `context`.
        """
        return self._identified(ssl._create_unverified_context())  # noqa: S323, SLF001 - see above

    def _identified(self, context: ssl.SSLContext) -> ssl.SSLContext:
        if self.cert_file is not None:
            try:
                key = None if self.key_file is None else regular(self.key_file)
                context.load_cert_chain(regular(self.cert_file), key)
            except OSError as error:
                message = f"{self.cert_file} and {self.key_file} cannot be used: {error}"
                raise OSError(message) from error
        return context


class Client:
    """Queries one agent."""

    def __init__(
        self, request: Request, seconds: float = TIMEOUT, unauthorized: str = UNAUTHORIZED
    ) -> None:
        """Send requests like `request`, to other paths; each exchange takes at most `seconds`.

        `unauthorized` says what to do about a status of 401.
        """
        self._request = request
        self._seconds = seconds
        self._unauthorized = unauthorized

    @property
    def url(self) -> str:
        """The agent's URL, for messages."""
        return self._request.url

    def get(self, path: str) -> bytes:
        """Return the body of the agent's answer. Raise Unreachable."""
        request = dataclasses.replace(self._request, path=path)
        try:
            return exchange(request, self._seconds, MAX_DOCUMENT)
        except Rejected as error:
            if error.status == HTTPStatus.UNAUTHORIZED:
                why = WRONG if "Authorization" in request.headers else self._unauthorized
            else:  # of ours, the text says why; a proxy's is a page
                why = "" if error.detail.startswith("<") else error.detail
            message = str(error) if why in str(error) else f"{error} ({why})"
            raise Rejected(message, error.status, error.detail) from error

    def status(self) -> Mapping[str, Any]:
        """Return the status document, which fits `document.STATUS`. Raise Unreachable."""
        return self._document("/api/v1/status", document.parse)

    def history(self) -> Mapping[str, Any]:
        """Return the node's record, which fits `document.HISTORY`. Raise Unreachable."""
        return self._document("/api/v1/history", document.parse_history)

    def _document(self, path: str, parse: Callable[[bytes], dict[str, Any]]) -> Mapping[str, Any]:
        try:
            return parse(self.get(path))
        except DocumentError as error:
            raise Unreachable(f"{self.url} {error}") from error

    def targets(self) -> list[str]:
        """Return the nodes that the agent probes, as `HOST:PORT`. Raise Unreachable."""
        try:
            groups = json.loads(self.get("/api/v1/targets"))
            return [str(target) for group in groups for target in group["targets"]]
        except documents.MISSHAPEN as error:
            raise Unreachable(f"{self.url}/api/v1/targets: not a list of targets") from error


def local(loaded: Config, access: Access, seconds: float = TIMEOUT) -> Client:
    """Return a client for this node's agent, at the configured address.

    Its calls raise Impostor, before anything is sent, if another user's process answers there.
    With TLS, of which `web.config_file` or `access` tells, any certificate is accepted, unless
    `access` names authorities.
    Raise Unreachable if a file cannot be read.
    """
    host, port = listen_address(loaded.web.listen_address)
    try:
        if access.ca_file is None and (access.tls or _serves_tls(loaded)):
            tls: ssl.SSLContext | None = access.unverified_context()
        else:
            tls = access.context()
        headers = access.headers()
    except (OSError, ValueError, ArithmeticError) as error:
        raise Unreachable(f"the agent of this node cannot be queried: {error}") from error
    return Client(
        Request(
            host=_reachable(host), port=port, path="/", headers=headers, tls=tls, verify=identify
        ),
        seconds,
    )


def _serves_tls(loaded: Config) -> bool:
    """Return whether this node's agent serves HTTPS; False where the caller may not know, and has
    to say it. Raise OSError, or ValueError for no YAML.
    """
    if loaded.web.config_file is None:
        return False
    import yaml

    try:
        settings = yaml.safe_load(read_named(loaded.web.config_file).decode())
    except PermissionError:  # it has the hashes of passwords, and many are not everybody's to read
        return False
    except yaml.YAMLError as error:
        raise ValueError(f"web.config_file: {error}") from error
    return isinstance(settings, dict) and bool(settings.get("tls_server_config"))


def _reachable(host: str | None) -> str:
    """Return the address at which to reach the agent; loopback if it listens on all addresses."""
    if host is None:
        return "127.0.0.1"
    try:
        address = ipaddress.ip_address(host)
    except (ValueError, ArithmeticError):
        return host
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "::1"  # noqa: PLR2004 - of the protocol
    return host


def remote(loaded: Config, node: str, access: Access, unauthorized: str = UNAUTHORIZED) -> Client:
    """Return a client for `NODE`, `NODE:PORT` or `[ADDRESS]:PORT`, which is sent the credentials.

    A URL of one is taken as well, if it is of the scheme that the configuration gives.

    The default port is that of this node's agent.
    Raise ValueError if the address is invalid, OSError if a file cannot be read.
    """
    _, port = listen_address(loaded.web.listen_address)
    named, tls = node, access.context()
    scheme, is_url, rest = node.partition("://")
    if is_url and scheme == ("https" if tls else "http"):
        node = rest.removesuffix("/")
    bare = node.count(":") > 1 and not node.startswith("[")
    message = f"{named} is not a node: give NODE, NODE:PORT or [ADDRESS]:PORT"
    if "://" in node:
        scheme = ", and --tls only for https" if tls else ", and --tls for https"
        raise ValueError(message + scheme)
    try:
        parts = urlsplit(f"//[{node}]" if bare else f"//{node}")
        own = parts.port
    except (ValueError, ArithmeticError) as error:
        raise ValueError(message) from error
    if not parts.hostname or parts.path or parts.username is not None:
        raise ValueError(message)
    return Client(
        Request(host=parts.hostname, port=own or port, path="/", headers=access.headers(), tls=tls),
        unauthorized=unauthorized,
    )
