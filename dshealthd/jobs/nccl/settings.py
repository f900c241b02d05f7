"""NCCL's settings: how NCCL reads their values and an `nccl.conf`, and which values it rejects.

NCCL 2.30.7: src/misc/param.cc, `ncclGetLevel` in src/graph/paths.cc, `parseList` in
src/graph/tuning.cc; ranges from its documentation (docs/userguide/source/env.rst) and the
InfiniBand specification.
"""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING

from dshealthd.jobs.environment import ALLOWED, MAX_VALUE

if TYPE_CHECKING:
    from collections.abc import Mapping

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
_ALGORITHMS = frozenset(
    {"tree", "ring", "collnet", "collnetdirect", "collnetchain", "nvls", "nvlstree", "pat"}
)
_PROTOCOLS = frozenset({"ll", "ll128", "simple"})
_FUNCTIONS = frozenset({"broadcast", "reduce", "allgather", "reducescatter", "allreduce"})


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


def misfit(name: str, value: str) -> Misfit | None:
    """Return the problem of a setting's value; None if it has none, or the setting is unknown."""
    if not value:
        return None
    if name in {"NCCL_NET_GDR_LEVEL", "NCCL_P2P_LEVEL"}:
        return None if value in _LEVELS or value[0] in "0123456789" else Misfit.OUT_OF_RANGE
    if name in _WORDS:
        return None if value in _WORDS[name] else Misfit.OUT_OF_RANGE
    if name in {"NCCL_ALGO", "NCCL_PROTO"}:
        return (
            None
            if _is_list(value.lower(), _ALGORITHMS if name == "NCCL_ALGO" else _PROTOCOLS)
            else Misfit.OUT_OF_RANGE
        )
    if name in _RANGES:
        least, most = _RANGES[name]
        match = _NUMBER.match(value)
        if match is None or match.end() < len(value.rstrip(_SPACE)):
            return Misfit.NO_NUMBER
        found = number(value)
        return None if found is not None and least <= found <= most else Misfit.OUT_OF_RANGE
    return None


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
