"""The constants of an untrusted ELF file, read from an open descriptor."""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK = 1 << 20
SECTION_LIMIT = 64 << 20
"""Most bytes of constants that are read.

libnccl.so has half a MiB; a PyTorch with NCCL linked in has some ten.
"""
_HEADER = 64
_MAGIC = b"\x7fELF\x02\x01"
"""64-bit little-endian, the only kind that NCCL is built for."""
_ENTRY = struct.Struct("<IIQQQQ")
_ENTRY_SIZE = 64
"""Bytes of a section entry in 64-bit ELF; a file with another size could cause huge reads."""
_MAX_SECTIONS = 4096
"""Limit per file; libtorch_cuda.so has some 40."""


def constants(descriptor: int) -> Iterator[bytes]:
    """Yield an ELF file's section `.rodata` in pieces; nothing if the file is not 64-bit ELF.

    OSError.
    """
    header = os.pread(descriptor, _HEADER, 0)
    if len(header) < _HEADER or not header.startswith(_MAGIC):
        return
    (table,) = struct.unpack_from("<Q", header, 40)
    size, count, names = struct.unpack_from("<3H", header, 58)
    total = os.fstat(descriptor).st_size
    if size != _ENTRY_SIZE or count > _MAX_SECTIONS or table >= total:
        return
    sections = os.pread(descriptor, size * count, table)
    starts = range(0, len(sections) - _ENTRY.size + 1, size)
    entries = [_ENTRY.unpack_from(sections, start) for start in starts]
    if names >= len(entries) or entries[names][4] > total:
        return
    text = os.pread(descriptor, min(entries[names][5], CHUNK), entries[names][4])
    for name, _kind, _flags, _address, offset, length in entries:
        if text[name : name + 8] == b".rodata\0":
            end = min(offset + min(length, SECTION_LIMIT), total)
            for start in range(offset, end, CHUNK):
                yield os.pread(descriptor, min(CHUNK, end - start), start)
            return
