"""The note on a heartbeat's page that says where a training saves its checkpoints, as bytes.

It is written once a save, into the room that messages leave at the end of their slots, so that a
step costs nothing more, and an agent that knows no notes reads the messages as ever. It has a
checksum, by which a note that is read while it is written is told from one that is whole.
"""

from __future__ import annotations

import os
import struct
from binascii import crc32
from typing import NamedTuple

from dshealthd.training.message import MAX_COUNT, PAGE, ROOM, SLOT

MAGIC = b"dshc"
VERSION = 1
SIZE = PAGE // SLOT * ROOM
_HEADER = struct.Struct("<4sBxHI")
"""Magic, version, length, and the checksum of all behind it."""
_BODY = struct.Struct("<QIBxxx")
"""How many saves, optimizer files, flags; the directory follows."""
_NODE_LOCAL = 1


class Saved(NamedTuple):
    """The last checkpoint that a rank took part in."""

    directory: str
    """Absolute, as the training sees it: where DeepSpeed puts `latest` and a directory for each
    tag.
    """
    saves: int
    """How many were completed so far."""
    optimizer_files: int | None = None
    """How many `*_optim_states.pt` DeepSpeed writes for all ranks together; None is unknown."""
    is_node_local: bool = False
    """Whether each node saves on a disk of its own."""


def encode(saved: Saved) -> bytes:
    """Return the note of a save, SIZE bytes; ValueError if the directory is too long for one."""
    flags = _NODE_LOCAL if saved.is_node_local else 0
    body = _BODY.pack(saved.saves, saved.optimizer_files or 0, flags)
    body += os.fsencode(saved.directory)
    length = _HEADER.size + len(body)
    if length > SIZE:
        message = f"{len(saved.directory)} characters are too many for the path of a checkpoint"
        raise ValueError(message)
    return (_HEADER.pack(MAGIC, VERSION, length, crc32(body)) + body).ljust(SIZE, b"\0")


def decode(page: bytes) -> Saved | None:
    """Return the note of a save on a page, None if there is none; ValueError if it is not whole.

    It is trusted as its own sender's account only.
    """
    data = b"".join(page[start + SLOT - ROOM : start + SLOT] for start in range(0, PAGE, SLOT))
    if not data.rstrip(b"\0"):
        return None
    magic, version, length, checksum = _HEADER.unpack_from(data)
    if magic != MAGIC or version < VERSION or not _HEADER.size + _BODY.size < length <= SIZE:
        message = f"no note of a checkpoint: it begins with {data[:8]!r}"
        raise ValueError(message)
    if crc32(data[_HEADER.size : length]) != checksum:
        message = "the checksum is wrong"
        raise ValueError(message)
    saves, files, flags = _BODY.unpack_from(data, _HEADER.size)
    directory = os.fsdecode(data[_HEADER.size + _BODY.size : length])
    if saves > MAX_COUNT or not directory.startswith("/"):
        message = f"no directory of checkpoints: {directory[:60]!r}"
        raise ValueError(message)
    return Saved(directory, saves, files or None, bool(flags & _NODE_LOCAL))
