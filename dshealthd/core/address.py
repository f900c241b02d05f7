"""Listen addresses as the config writes them."""

from __future__ import annotations

import ipaddress

MAX_PORT = 65535


def listen_address(text: str) -> tuple[str | None, int]:
    """Return host (None for all addresses) and port of a listen address.

    ValueError says what is wrong with it.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > MAX_PORT:
        message = f'"{text}" is not "HOST:PORT" or ":PORT" with a port from 0 to {MAX_PORT}'
        raise ValueError(message)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError as error:
            message = f'"{host}" is not an IPv6 address'
            raise ValueError(message) from error
    elif ":" in host:
        message = f'"{text}": an IPv6 address is written in brackets'
        raise ValueError(message)
    return host or None, int(port)
