"""The resolver of nodes' names: no name server can make a caller wait beyond its deadline.

`getaddrinfo` blocks as long as a silent name server makes it, and cannot be stopped. It runs in a
few daemon threads, which do not hold up the exit of the process. A known address stays in use until
a newer one is available.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections.abc import Callable
from typing import Any

from dshealthd.core import background
from dshealthd.core.sockets import name_is_unknown
from dshealthd.probe.members.hostlist import numeric

KEPT = 60.0
"""Seconds for which a name's addresses are cached."""
FAILURE_KEPT = 5.0
"""Seconds before a failed look-up of a name is retried."""
MAX_LOOKUPS = 4
"""Concurrent look-ups, each in a thread."""
MAX_ADDRESSES = 4
"""Most addresses of one name to try."""
NAME_UNKNOWN = "name_unknown"
"""The reason of a call to a node whose name does not exist: nothing is known of the node."""

Address = tuple[socket.AddressFamily, str]


class LookupFailed(Exception):
    """No name server answered; nothing is known about the name or its node."""


class UnknownName(LookupFailed):
    """The name servers say that the name does not exist."""


class Resolver:
    """Looks up names and caches the results."""

    def __init__(
        self,
        look_up: Callable[..., list[Any]] = socket.getaddrinfo,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`look_up` is called as `socket.getaddrinfo`, in a thread."""
        self._look_up = look_up
        self._monotonic = monotonic
        self._known: dict[str, tuple[Address, ...]] = {}
        self._asked: dict[str, float] = {}
        """When the last look-up of a name ended."""
        self._failed: dict[str, type[LookupFailed]] = {}
        self._pending: dict[str, asyncio.Task[None]] = {}
        self._free = asyncio.Semaphore(MAX_LOOKUPS)

    async def addresses(self, host: str) -> tuple[Address, ...]:
        """Return the addresses that a node's name resolves to, at least one. Raises UnknownName or
        LookupFailed. Waits for the name servers, so callers set a deadline.
        """
        if (address := literal(host)) is not None:
            return (address,)
        known = self._known.get(host)
        age = self._monotonic() - self._asked.get(host, -KEPT)
        if age >= (FAILURE_KEPT if host in self._failed else KEPT):
            task = self._pending.get(host)
            if task is None:
                task = self._pending[host] = asyncio.create_task(
                    self._refresh(host), name=f"looking up {host}"
                )
            if known is None:
                # Not awaited directly: several callers share the look-up, and one that gives up
                # must not cancel it for the others.
                await asyncio.wait({task})
                known = self._known.get(host)
        if known is None:
            raise self._failed.get(host, LookupFailed)(host)
        return known

    def forget(self, host: str) -> None:
        """Forget a name that no member has any more: new ones may keep coming."""
        for known in (self._known, self._asked, self._failed):
            known.pop(host, None)

    async def close(self) -> None:
        """Give up the look-ups of names in progress; their threads end on their own."""
        tasks = list(self._pending.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _refresh(self, host: str) -> None:
        try:
            async with self._free:
                addresses = await background.call(
                    lambda: self._resolve(host), "name look-up", None, OSError
                )
            self._failed.pop(host, None)
            self._known[host] = addresses
        except OSError as error:  # StartError is one; an old address stays in use
            no_such = isinstance(error, socket.gaierror) and name_is_unknown(error)
            self._failed[host] = UnknownName if no_such else LookupFailed
        finally:
            self._asked[host] = self._monotonic()
            del self._pending[host]

    def _resolve(self, host: str) -> tuple[Address, ...]:
        """Look up a node's name. Blocks. Raises OSError (gaierror is one)."""
        try:
            entries = self._look_up(host, None, type=socket.SOCK_STREAM)
        except UnicodeError as error:  # not a valid internationalized name
            raise socket.gaierror(socket.EAI_NONAME, str(error)) from error
        found = dict.fromkeys((entry[0], str(entry[4][0])) for entry in entries)
        return tuple(found)[:MAX_ADDRESSES]


def literal(host: str) -> Address | None:
    """Return a numeric address with its family; None for a name, which must be looked up."""
    address = numeric(host)
    family = socket.AF_INET6 if isinstance(address, ipaddress.IPv6Address) else socket.AF_INET
    return None if address is None else (family, host)
