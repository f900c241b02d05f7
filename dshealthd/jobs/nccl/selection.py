"""How NCCL chooses network interfaces by `NCCL_SOCKET_IFNAME`, and adapters by `NCCL_IB_HCA`.

NCCL 2.30.7: `parseStringList` and `matchIfList` in src/misc/utils.cc, used in src/os/linux.cc and
src/transport/net_ib/init.cc.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_PORT = re.compile(r"\s*([+-]?\d+)")


@dataclass(frozen=True, slots=True)
class SelectedName:
    """One of the names between commas."""

    name: str
    port: int | None
    """None is every port."""


@dataclass(frozen=True, slots=True)
class Selection:
    """A list of names to use or to exclude, either all prefixes or all exact."""

    exclude: bool
    exact: bool
    entries: tuple[SelectedName, ...]

    def takes(self, name: str, port: int | None = None) -> bool:
        """Return whether a device or its port is selected; interfaces have no port."""
        return self._lists(name, port) != self.exclude

    def names(self, entry: SelectedName, name: str, port: int | None = None) -> bool:
        """Return whether an entry of the selection matches a device or port."""
        if port is not None and entry.port is not None and port != entry.port:
            return False
        return name == entry.name if self.exact else name.startswith(entry.name)

    def _lists(self, name: str, port: int | None) -> bool:
        return not self.entries or any(self.names(entry, name, port) for entry in self.entries)


def parse_selection(text: str) -> Selection:
    """Return the selection of a value such as `NCCL_IB_HCA`'s: a leading `^` excludes, `=` after it
    makes names exact, and `:` precedes a port.
    """
    exclude = text.startswith("^")
    text = text.removeprefix("^")
    exact = text.startswith("=")
    found = (_entry(entry) for entry in text.removeprefix("=").split(","))
    return Selection(exclude, exact, tuple(entry for entry in found if entry is not None))


def _entry(text: str) -> SelectedName | None:
    name, *more = text.split(":")
    if not name:
        return None
    if not more or not more[0]:
        return SelectedName(name, None)
    port = int(match[1]) if (match := _PORT.match(more[0])) else 0  # as atoi(3) does
    return SelectedName(name, None if port == -1 else port)
