"""NCCL's settings: how NCCL reads their values and an `nccl.conf`, which values it rejects, and how
it chooses interfaces and adapters by them.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass

from dshealthd.jobs.environment import ALLOWED, MAX_VALUE

_NUMBER = re.compile(r"[ \t\n\v\f\r]*([+-]?)(?:0[xX]([0-9a-fA-F]+)|(0[0-7]*)|([1-9][0-9]*))")
_SPACE = " \t\n\v\f\r"
_LARGEST = (1 << 63) - 1
_ANY_NUMBER = (-_LARGEST - 1, _LARGEST)

_RANGES = {
    "NCCL_IB_TIMEOUT": (1, 31),  # 0, and 32 and more, wait forever
    "NCCL_IB_RETRY_CNT": (0, 7),
    "NCCL_IB_SL": (0, 15),
    "NCCL_IB_TC": (0, 255),
    "NCCL_IB_QPS_PER_CONNECTION": (1, 128),
    "NCCL_SOCKET_NTHREADS": (1, 16),
    "NCCL_NSOCKS_PERTHREAD": (1, 64),
    "NCCL_MIN_CTAS": (1, 64),
    "NCCL_MAX_CTAS": (1, 64),
    **dict.fromkeys(("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"), (0, 1)),
    **dict.fromkeys(
        ("NCCL_BUFFSIZE", "NCCL_LL_BUFFSIZE", "NCCL_LL128_BUFFSIZE", "NCCL_P2P_NET_CHUNKSIZE"),
        (1, _LARGEST),
    ),
    **dict.fromkeys(
        ("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_COLLNET_ENABLE", "NCCL_NVLS_ENABLE"),
        _ANY_NUMBER,
    ),
}
"""Numeric settings, with the least and the greatest value."""
_LEVELS = frozenset({"LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS"})
_WORDS: Mapping[str, frozenset[str]] = {
    "NCCL_NTHREADS": frozenset({"64", "128", "256", "512"}),
    "NCCL_SOCKET_FAMILY": frozenset({"AF_INET", "AF_INET6"}),
}
_LISTS = {
    "NCCL_ALGO": frozenset(
        {"tree", "ring", "collnet", "collnetdirect", "collnetchain", "nvls", "nvlstree", "pat"}
    ),
    "NCCL_PROTO": frozenset({"ll", "ll128", "simple"}),
}
_FUNCTIONS = frozenset({"broadcast", "reduce", "allgather", "reducescatter", "allreduce"})
_PORT = re.compile(r"\s*([+-]?\d+)")


class Misfit(enum.StrEnum):
    """The problem of a value."""

    OUT_OF_RANGE = "out_of_range"
    """NCCL rejects it, or takes it for something else, such as an infinite timeout."""
    NO_NUMBER = "no_number"
    """It is not a number, but NCCL reads one in it, such as 0 in `true`."""


def number(text: str) -> int | None:
    """Return the number that NCCL reads in a setting's value.

    None if NCCL takes its default: the value is empty, or exceeds 64 bits.
    """
    if not text:
        return None
    match = _NUMBER.match(text)
    if match is None:
        return 0
    sign, hexadecimal, octal, decimal = match.groups()
    value = int(hexadecimal, 16) if hexadecimal else int(octal, 8) if octal else int(decimal)
    value = -value if sign == "-" else value
    return value if _ANY_NUMBER[0] <= value <= _LARGEST else None


def value_problem(name: str, value: str) -> Misfit | None:
    """Return the problem of a setting's value; None if it has none, or the setting is unknown."""
    fits = True
    if not value:
        return None
    if name in {"NCCL_NET_GDR_LEVEL", "NCCL_P2P_LEVEL"}:
        fits = value in _LEVELS or value[0] in "0123456789"
    elif name in _WORDS:
        fits = value in _WORDS[name]
    elif name in _LISTS:
        fits = _is_list(value.lower(), _LISTS[name])
    elif name in _RANGES:
        match, found = _NUMBER.match(value), number(value)
        if match is None or match.end() < len(value.rstrip(_SPACE)):
            return Misfit.NO_NUMBER
        least, most = _RANGES[name]
        fits = found is not None and least <= found <= most
    return None if fits else Misfit.OUT_OF_RANGE


def _is_list(text: str, elements: frozenset[str]) -> bool:
    """Return whether a setting is `[function:][^]element,…`, with `;` between functions."""
    for index, part in enumerate(part for part in text.split(";") if part):
        function, colon, listed = part.partition(":")
        if colon and function not in _FUNCTIONS:
            return False
        if not colon and index:
            return False
        if not elements.issuperset(
            filter(None, (listed if colon else part).removeprefix("^").split(","))
        ):
            return False
    return True


def parse_configuration(data: bytes) -> tuple[dict[str, str], bytes]:
    """Return the allowed variables that an `nccl.conf` sets, and all of its lines in the form of an
    environment, for their names.

    The first of two equal names counts, because NCCL does not overwrite a variable that is set.
    """
    found: dict[str, str] = {}
    lines = [line.removesuffix(b"\r") for line in data.split(b"\n")]
    lines = [line for line in lines if b"=" in line and not line.startswith(b"#")]
    for line in lines:
        name, _, value = line.partition(b"=")
        if len(value) <= MAX_VALUE and (key := name.decode(errors="replace")) in ALLOWED:
            found.setdefault(key, value.decode(errors="replace"))
    return found, b"\0".join(lines)


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

    def covers(self, name: str, port: int | None = None) -> bool:
        """Return whether a device or its port is selected; interfaces have no port."""
        listed = not self.entries or any(self.names(entry, name, port) for entry in self.entries)
        return listed != self.exclude

    def names(self, entry: SelectedName, name: str, port: int | None = None) -> bool:
        """Return whether an entry of the selection matches a device or port."""
        if port is not None and entry.port is not None and port != entry.port:
            return False
        return name == entry.name if self.exact else name.startswith(entry.name)


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
