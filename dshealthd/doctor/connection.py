"""One connection to another node that carries no data, and how it ends."""

from __future__ import annotations

import enum
import errno
import socket
from typing import Any

from dshealthd.core.sockets import name_is_unknown
from dshealthd.core.text import printable

MAX_ADDRESSES = 4
"""Most addresses of a name that are tried: a node has few, and each may cost the whole timeout."""


class ConnectionOutcome(enum.StrEnum):
    """Whether a node can be reached; of several addresses, the first of these counts."""

    OK = "ok"
    REFUSED = "refused"
    TIMED_OUT = "timed_out"
    UNREACHABLE = "unreachable"
    FAILED = "failed"
    NAME_UNKNOWN = "name_unknown"


def connect(host: str, port: int, timeout: float) -> ConnectionOutcome:
    """Return the outcome of a connection that sends nothing. Blocks.

    OSError if no name server answers, which says nothing about the node.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if not name_is_unknown(error):
            message = f"no name server could resolve {printable(host)}: "
            raise OSError(message + (error.strerror or str(error))) from error
        return ConnectionOutcome.NAME_UNKNOWN
    except UnicodeError:
        return ConnectionOutcome.NAME_UNKNOWN
    found = [
        _attempt(family, address, timeout) for family, _, _, _, address in addresses[:MAX_ADDRESSES]
    ]
    return min(found, key=[*ConnectionOutcome].index, default=ConnectionOutcome.NAME_UNKNOWN)


def _attempt(family: int, address: tuple[Any, ...], timeout: float) -> ConnectionOutcome:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as made:
            made.settimeout(timeout)
            made.connect(address)
    except TimeoutError:
        return ConnectionOutcome.TIMED_OUT
    except OSError as error:
        if error.errno == errno.ECONNREFUSED:
            return ConnectionOutcome.REFUSED
        if error.errno == errno.ETIMEDOUT:
            return ConnectionOutcome.TIMED_OUT
        unreachable = error.errno in {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}
        return ConnectionOutcome.UNREACHABLE if unreachable else ConnectionOutcome.FAILED
    return ConnectionOutcome.OK
