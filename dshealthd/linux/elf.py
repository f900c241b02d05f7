"""The constants and functions of an untrusted ELF file, read from an open descriptor."""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Iterator
from typing import NamedTuple

CHUNK = 1 << 20
SECTION_LIMIT = 64 << 20
"""Most bytes of constants that are read: libnccl.so has half a MiB, PyTorch's NCCL ten."""
SYMBOLS_LIMIT = 8 << 20
"""Most bytes of symbols: 350,000 of them, which take some 50 ms; libtorch_cuda.so has half."""
_PLACES = 64
"""Most strings of a table that end with one name; NCCL's have two, `ncclSend` and `pncclSend`."""
_HEADER = 64
_MAGIC = b"\x7fELF\x02\x01"
"""64-bit little-endian, the only kind that NCCL is built for."""
_SECTION = struct.Struct("<IIQQQQIIQQ")
"""A section's entry; a file that names another size could cause huge reads."""
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_LOAD, _DYNAMIC_SYMBOLS, _FUNCTION = 1, 11, 2
_MAX_SECTIONS = 4096
"""Limit per file; libtorch_cuda.so has some 40."""


def _parts(descriptor: int) -> tuple[bytes, list[tuple[int, ...]]]:
    """Return the header and the sections of an ELF file; no sections if it is not one, or has more
    than any library. OSError.
    """
    header = os.pread(descriptor, _HEADER, 0)
    if len(header) < _HEADER or not header.startswith(_MAGIC):
        return header, []
    (table,) = struct.unpack_from("<Q", header, 40)
    size, count = struct.unpack_from("<2H", header, 58)
    if size != _SECTION.size or count > _MAX_SECTIONS or table >= os.fstat(descriptor).st_size:
        return header, []
    sections = os.pread(descriptor, size * count, table)
    return header, [*_SECTION.iter_unpack(sections[: len(sections) // size * size])]


def constants(descriptor: int) -> Iterator[bytes]:
    """Yield a 64-bit ELF file's section `.rodata` in pieces; nothing of others. OSError."""
    header, sections = _parts(descriptor)
    total = os.fstat(descriptor).st_size
    (names,) = struct.unpack_from("<H", header, 62) if sections else (0,)
    if names >= len(sections) or sections[names][4] > total:
        return
    text = os.pread(descriptor, min(sections[names][5], CHUNK), sections[names][4])
    for name, _, _, _, offset, length, *_ in sections:
        if text[name : name + 8] == b".rodata\0":
            end = min(offset + min(length, SECTION_LIMIT), total)
            for start in range(offset, end, CHUNK):
                yield os.pread(descriptor, min(CHUNK, end - start), start)
            return


class Function(NamedTuple):
    """An exported function of a library."""

    offset: int
    """Of its first instruction in the file."""
    code: bytes
    """Its first eight bytes."""


def functions(descriptor: int, names: Collection[str]) -> dict[str, Function]:
    """Return the named functions that a library exports. OSError, struct.error, OverflowError."""
    header, parts = _parts(descriptor)
    if not parts:
        return {}
    (segments,) = struct.unpack_from("<Q", header, 32)
    segment_size, segment_count = struct.unpack_from("<2H", header, 54)
    if segment_size != _SEGMENT.size or segment_count > _MAX_SECTIONS:
        return {}
    mapped = [
        (offset, start, length)
        for kind, _, offset, start, _, length, _, _ in _SEGMENT.iter_unpack(
            os.pread(descriptor, segment_size * segment_count, segments)
        )
        if kind == _LOAD
    ]
    found: dict[str, Function] = {}
    tables = [part for part in parts if part[1] == _DYNAMIC_SYMBOLS and part[6] < len(parts)]
    for _, _, _, _, offset, length, link, _, _, _ in tables[:1]:  # no library has more than one
        text = os.pread(descriptor, min(parts[link][5], SECTION_LIMIT), parts[link][4])
        places = dict(_places(text, names))
        symbols = os.pread(descriptor, min(length, SYMBOLS_LIMIT), offset)
        for at, info, _, section, value, _ in _SYMBOL.iter_unpack(
            symbols[: len(symbols) // _SYMBOL.size * _SYMBOL.size]
        ):
            if at in places and info & 15 == _FUNCTION and section:
                name = places.pop(at)  # once: a file may have many symbols, and many segments
                for begin, start, extent in mapped:
                    if start <= value < start + extent:
                        place = value - start + begin
                        found[name] = Function(place, os.pread(descriptor, 8, place))
    return found


def _places(text: bytes, names: Collection[str]) -> Iterator[tuple[int, str]]:
    """Yield where names end in a table of strings: linkers store one within a longer one."""
    for name in names:
        whole, at = name.encode() + b"\0", -1
        for _ in range(_PLACES):
            if (at := text.find(whole, at + 1)) < 0:
                break
            yield at, name
