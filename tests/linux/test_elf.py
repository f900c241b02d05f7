"""An ELF file that lies about itself costs nothing; whole ones are read in tests/jobs/nccl."""

from __future__ import annotations

import contextlib
import os
import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dshealthd.linux import elf
from dshealthd.linux.elf import SYMBOLS_LIMIT, constants, functions

MAGIC = b"\x7fELF\x02\x01\x01"


@pytest.mark.parametrize(
    ("size", "count", "read"),
    [(0xFFFF, 0xFFFF, 0), (0xFFFF, 1, 0), (64, 4096, 4096), (64, 4097, 0), (40, 3, 0), (0, 3, 0)],
)
def test_a_table_of_impossible_sections_is_left(
    tmp_path: Path, size: int, count: int, read: int
) -> None:
    """A user's file of a TiB of holes, whose entries have another size or are too many."""
    place = tmp_path / "libnccl.so.2"
    header = MAGIC.ljust(40, b"\0") + struct.pack("<Q", 64) + b"\0" * 10
    place.write_bytes(header + struct.pack("<3H", size, count, 0))
    os.truncate(place, 1 << 40)
    descriptor = os.open(place, os.O_RDONLY)
    assert len(elf._parts(descriptor)[1]) == read
    tracemalloc.start()
    try:
        assert list(constants(descriptor)) == []
        assert functions(descriptor, {"ncclSend"}) == {}
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
        os.close(descriptor)


@pytest.mark.parametrize(("size", "count"), [(57, 1), (56, 4097)])
def test_a_table_of_impossible_segments_is_left(tmp_path: Path, size: int, count: int) -> None:
    """As one of sections is."""
    whole = bytearray(library(b"ncclSend"))
    struct.pack_into("<2H", whole, 54, size, count)
    assert read(tmp_path, bytes(whole), "ncclSend") == {}


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", MAGIC, b"\x7fELF\1\1\1" + bytes(99)])
def test_what_is_no_library(tmp_path: Path, content: bytes) -> None:
    """A script, a file of 32 bits, and one that is cut have neither constants nor functions."""
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb") as file:
        assert [*constants(file.fileno())] == []
        assert functions(file.fileno(), {"ncclSend"}) == {}


def test_constants_are_bounded(tmp_path: Path) -> None:
    """Of a section of 65 MiB, 64 are read."""
    place, text = tmp_path / "libnccl.so.2", b"\0.rodata\0"
    header = MAGIC.ljust(40, b"\0") + struct.pack("<Q", 64) + b"\0" * 10
    header += struct.pack("<3H", 64, 2, 0)
    for name, offset, size in ((0, 192, len(text)), (1, 4096, 65 << 20)):
        header += struct.pack("<IIQQQQIIQQ", name, 3, 0, 0, offset, size, 0, 0, 0, 0)
    place.write_bytes(header + text)
    os.truncate(place, 4096 + (65 << 20))
    with place.open("rb") as file:
        assert sum(map(len, constants(file.fileno()))) == 64 << 20


def library(*names: bytes, value: int = 0x1000, count: int | None = None) -> bytes:
    """Return a library of one segment at 0x1000, whose functions are all at one address."""
    text = b"".join(name + b"\0" for name in names)
    places = [text.index(name + b"\0") for name in names]
    symbols = b"".join(struct.pack("<IBBHQQ", at, 0x12, 0, 1, value, 0) for at in places)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, 0x1000, 0, 0x1000, 0x1000, 0)
    at_text, at_symbols = 120, 120 + len(text)
    length = len(symbols) if count is None else count * 24
    entries = [
        struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, offset, size, link, 0, 0, 0)
        for kind, offset, size, link in ((3, at_text, len(text), 0), (11, at_symbols, length, 0))
    ]
    table = at_symbols + len(symbols)
    header = MAGIC.ljust(32, b"\0") + struct.pack("<QQ", 64, table) + b"\0" * 6
    header += struct.pack("<5H", 56, 1, 64, len(entries), 0)
    return header + segment + text + symbols + b"".join(entries)


def read(tmp_path: Path, content: bytes, *names: str) -> dict[str, int]:
    """Return the offsets of the functions of a library."""
    place = tmp_path / "libnccl.so.2"
    place.write_bytes(content)
    descriptor = os.open(place, os.O_RDONLY)
    try:
        return {name: found.offset for name, found in functions(descriptor, set(names)).items()}
    finally:
        os.close(descriptor)


def test_functions(tmp_path: Path) -> None:
    """A name may be stored as the end of a longer one, and one that only ends so is another's."""
    whole = library(b"pncclSend", b"ncclSend", value=0x1010)
    assert read(tmp_path, whole, "ncclSend", "ncclRecv") == {"ncclSend": 0x10}
    assert read(tmp_path, library(b"pncclSend"), "ncclSend") == {}
    assert read(tmp_path, library(b"ncclSend", value=0x2000), "ncclSend") == {}


@pytest.mark.parametrize(("times", "found"), [(64, 64), (65, 64)])
def test_places_of_a_name_are_bounded(times: int, found: int) -> None:
    """Of a table of 64 MiB that repeats one name the places would take ten times as much memory."""
    assert len([*elf._places(b"ncclSend\0" * times, {"ncclSend"})]) == found


def test_a_function_is_looked_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of thousands of symbols, each sought in thousands of segments, take no minutes."""
    reads, pread = list[tuple[int, ...]](), os.pread

    def counted(*where: int) -> bytes:
        reads.append(where)
        return pread(*where)

    monkeypatch.setattr(os, "pread", counted)
    assert read(tmp_path, library(*[b"ncclSend"] * 1000), "ncclSend") == {"ncclSend": 0}
    assert len(reads) < 10


@given(st.integers(0, 400), st.binary(max_size=80))
@example(40, struct.pack("<Q", 2**64 - 1))
@example(32, struct.pack("<Q", 2**63))
def test_a_damaged_library(at: int, wrong: bytes) -> None:
    """Nothing but what callers expect is raised, whatever is damaged."""
    whole = library(b"ncclSend", b"ncclRecv")
    descriptor = os.memfd_create("library")
    try:
        os.write(descriptor, whole[:at] + wrong + whole[at + len(wrong) :])
        with contextlib.suppress(struct.error, OverflowError, OSError):
            assert functions(descriptor, {"ncclSend"}).keys() <= {"ncclSend"}
    finally:
        os.close(descriptor)


def test_a_library_that_claims_too_many_symbols(tmp_path: Path) -> None:
    """A table beyond its limit is cut, and the file's end ends it."""
    assert read(tmp_path, library(b"ncclSend", count=SYMBOLS_LIMIT), "ncclSend") == {"ncclSend": 0}
