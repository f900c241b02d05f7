"""The note on a heartbeat's page that says where a job saves its checkpoints."""

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
"""Magic, version, length, and the checksum of everything after the header."""
_BODY = struct.Struct("<QIBxxx")
"""Number of saves, number of optimizer files, flags; the directory follows."""
_NODE_LOCAL, _OTHER_LAYOUT = 1, 2


class Saved(NamedTuple):
    """The last checkpoint that a rank took part in."""

    directory: str
    """Absolute, as the job sees it: where DeepSpeed puts `latest` and a directory for each tag."""
    saves: int
    """Saves completed so far."""
    optimizer_files: int | None = None
    """Number of `*_optim_states.pt` that DeepSpeed writes for all ranks; None is unknown."""
    is_node_local: bool = False
    """Whether each node saves to its own disk."""
    is_deepspeed: bool = True
    """Whether its files are DeepSpeed's; others may have a `latest` of their own."""


def encode(saved: Saved) -> bytes:
    """Return the note of a save, SIZE bytes; ValueError if the directory is too long."""
    flags = _NODE_LOCAL * saved.is_node_local | _OTHER_LAYOUT * (not saved.is_deepspeed)
    body = _BODY.pack(saved.saves, saved.optimizer_files or 0, flags)
    body += os.fsencode(saved.directory)
    length = _HEADER.size + len(body)
    if length > SIZE:
        message = f"{len(saved.directory)} characters are too many for the path of a checkpoint"
        raise ValueError(message)
    return (_HEADER.pack(MAGIC, VERSION, length, crc32(body)) + body).ljust(SIZE, b"\0")


def decode(page: bytes) -> Saved | None:
    """Return the note of a save on a page, None if there is none; ValueError if it is not whole.

    The note is trusted only as its sender's own claim.
    """
    data = b"".join(page[start + SLOT - ROOM : start + SLOT] for start in range(0, PAGE, SLOT))
    if not data.rstrip(b"\0"):
        return None
    magic, version, length, checksum = _HEADER.unpack_from(data)
    if magic != MAGIC or version < VERSION or not _HEADER.size + _BODY.size < length <= SIZE:
        raise ValueError(f"not a checkpoint note: it begins with {data[:8]!r}")
    if crc32(data[_HEADER.size : length]) != checksum:
        raise ValueError("wrong checksum")
    saves, files, flags = _BODY.unpack_from(data, _HEADER.size)
    directory = os.fsdecode(data[_HEADER.size + _BODY.size : length])
    if saves > MAX_COUNT or not directory.startswith("/"):
        raise ValueError(f"not a checkpoint directory: {directory[:60]!r}")
    return Saved(
        directory, saves, files or None, bool(flags & _NODE_LOCAL), not flags & _OTHER_LAYOUT
    )
