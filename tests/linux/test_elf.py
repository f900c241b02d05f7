"""An ELF file that lies about itself costs nothing; whole ones are read in tests/jobs/nccl."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path

import pytest

from dshealthd.linux.elf import constants

MAGIC = b"\x7fELF\x02\x01\x01"


@pytest.mark.parametrize(
    ("size", "count"), [(0xFFFF, 0xFFFF), (0xFFFF, 1), (64, 0xFFFF), (40, 3), (0, 3)]
)
def test_a_table_of_impossible_sections_is_left(tmp_path: Path, size: int, count: int) -> None:
    """A user's file of a TiB of holes, whose entries have another size or are too many."""
    place = tmp_path / "libnccl.so.2"
    header = MAGIC.ljust(40, b"\0") + struct.pack("<Q", 64) + b"\0" * 10
    place.write_bytes(header + struct.pack("<3H", size, count, 0))
    os.truncate(place, 1 << 40)
    descriptor = os.open(place, os.O_RDONLY)
    tracemalloc.start()
    try:
        assert list(constants(descriptor)) == []
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
        os.close(descriptor)
