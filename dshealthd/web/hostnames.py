"""Host names that browsers may use for this agent: a defense against DNS rebinding.

A malicious site can make its own name resolve to this node, and then read the agent's answers as
its own. Such a request has the site's name in `Host`. Only browsers are checked, recognized by
headers that other clients do not send, as Prometheus may know a node by any name.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping

from dshealthd.core.host import read

RESOLVER = "/etc/resolv.conf"
_SIGNS = ("Origin", "Sec-Fetch-Site", "Sec-Fetch-Mode")
_AGENT = "Mozilla/"
"""Prefix of every browser's User-Agent; Sec-Fetch headers come only with TLS."""


def parse_domains(text: str) -> frozenset[str]:
    """Return the search domains in a `resolv.conf`."""
    lines = (line.split() for line in text.splitlines())
    return frozenset(
        word.strip(".").lower()
        for words in lines
        if words[:1] in (["search"], ["domain"])
        for word in words[1:]
    )


def search_domains() -> frozenset[str]:
    """Return the search domains of the node's resolver; none if they cannot be read."""
    try:
        return parse_domains(read(RESOLVER))
    except OSError:
        return frozenset()


def own_names(node: str, domains: Iterable[str], configured: Iterable[str]) -> frozenset[str]:
    """Return a node's host names: short, full, in the search domains, and `configured` ones."""
    full = node.lower()
    short = full.partition(".")[0]
    names = {full, short, "localhost", *(f"{short}.{domain}" for domain in domains)}
    return frozenset(names | {name.lower() for name in configured})


def is_own(host: str, names: frozenset[str]) -> bool:
    """Return whether a `Host` header, with or without a port, is an address or one of `names`."""
    name, colon, port = host.strip().lower().rpartition(":")
    if not colon or not port.isdecimal():
        name = host.strip().lower()
    name = name.removesuffix(".")
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except (ValueError, ArithmeticError):
        return name in names
    return True


def is_misdirected(headers: Mapping[str, str], names: frozenset[str]) -> bool:
    """Return whether a browser's request uses a host name that is not this node's."""
    browser = headers.get("User-Agent", "").startswith(_AGENT)
    browser = browser or any(sign in headers for sign in _SIGNS)
    return browser and not is_own(headers.get("Host", ""), names)
