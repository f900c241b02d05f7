"""The resolver of nodes' names, which no name server can make wait longer than the caller wants.

`getaddrinfo` blocks, for as long as a silent name server lets it, and cannot be stopped. It runs in
a few daemon threads, of which a process that ends does not wait; an address that was once known is
used again while no newer one can be had.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from typing import TYPE_CHECKING, Any

from dshealthd.core import background
from dshealthd.core.address import name_is_unknown

if TYPE_CHECKING:
    from collections.abc import Callable

KEPT = 60.0
"""Seconds for which an address is not looked up again."""
FAILURE_KEPT = 5.0
"""Seconds for which a name that could not be looked up is not tried again."""
PATIENCE = 0.5
"""Seconds that a caller waits for a newer address where there is an old one."""
MAX_LOOKUPS = 4
"""Look-ups, and so threads, at a time."""
MAX_ADDRESSES = 4
"""Addresses of one name that are tried."""
MAX_NAMES = 65_536

Address = tuple[socket.AddressFamily, str]


class LookupFailed(Exception):
    """No name server could tell; nothing is known of the name, nor of who has it."""


class UnknownName(LookupFailed):
    """The name servers say that there is no such name."""


class Resolver:
    """Looks names up and remembers what it found."""

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
        """Return the addresses that a node's name resolves to, at least one.

        UnknownName, LookupFailed; waits for the name servers, so it needs a deadline.
        """
        try:
            return (_literal(host),)
        except ValueError:
            pass
        known = self._known.get(host)
        age = self._monotonic() - self._asked.get(host, -KEPT)
        if age >= (FAILURE_KEPT if host in self._failed else KEPT):
            task = self._pending.get(host)
            if task is None:
                task = self._pending[host] = asyncio.create_task(
                    self._refresh(host), name=f"looking up {host}"
                )
            # Waited for and not awaited: several callers share the look-up, and one that gives up
            # must not end it for the others.
            await asyncio.wait({task}, timeout=None if known is None else PATIENCE)
            known = self._known.get(host)
        if known is None:
            raise self._failed.get(host, LookupFailed)(host)
        return known

    async def close(self) -> None:
        """Give up the look-ups of names in progress; their threads end when they may."""
        tasks = list(self._pending.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _refresh(self, host: str) -> None:
        try:
            async with self._free:
                addresses = await background.call(
                    lambda: self._ask(host), "name look-up", None, OSError
                )

            self._failed.pop(host, None)
            # Names come from the list of members, which may change for ever.
            if len(self._known) >= MAX_NAMES:
                self._known.clear()
            self._known[host] = addresses
        except OSError as error:  # StartError is one; the old address, if there is one, stays
            no_such = isinstance(error, socket.gaierror) and name_is_unknown(error)
            self._failed[host] = UnknownName if no_such else LookupFailed
        finally:
            self._asked[host] = self._monotonic()
            del self._pending[host]

    def _ask(self, host: str) -> tuple[Address, ...]:
        """Look a node's name up; blocks. OSError, of which gaierror is one."""
        try:
            entries = self._look_up(host, None, type=socket.SOCK_STREAM)
        except UnicodeError as error:  # an internationalised name that is none
            raise socket.gaierror(socket.EAI_NONAME, str(error)) from error
        found = dict.fromkeys((entry[0], str(entry[4][0])) for entry in entries)
        return tuple(found)[:MAX_ADDRESSES]


def _literal(host: str) -> Address:
    address = ipaddress.ip_address(host)
    return (socket.AF_INET6 if isinstance(address, ipaddress.IPv6Address) else socket.AF_INET, host)
