"""The files of NCCL's Inspector by name, owner and age, opened as what they are.

Files of other users, in directories that these can write to: nothing is opened but a regular file
of the user whose training writes it, with that user's rights.
"""

from __future__ import annotations

import enum
import itertools
import os
import re
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dshealthd.linux.credentials import assumed
from dshealthd.linux.process_files import Irregular, open_entry, rights_of
from dshealthd.linux.process_files import read as read_bytes

if TYPE_CHECKING:
    from collections.abc import Collection

MAX_ENTRIES = 20_000
"""Entries of a directory that are looked at."""
_NAME = re.compile(r"nccl_inspector_metrics_([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.prom")


class InspectorFileState(enum.StrEnum):
    """What becomes of a file."""

    TAKEN = "taken"
    STALE = "stale"
    """Not written for long, or in the future: its numbers are of another time."""
    ELSEWHERE = "elsewhere"
    """Of another node, in a directory that nodes share."""
    FOREIGN = "foreign"
    """Of a user who may not write there for the job."""
    IRREGULAR = "irregular"
    """A link, a FIFO, a device, a directory."""
    TOO_LARGE = "too_large"
    UNREADABLE = "unreadable"
    LEFT_OUT = "left_out"
    """There are more than max_files."""


class FileRefused(Exception):
    """A file that is not taken; `state` says why."""

    def __init__(self, state: InspectorFileState) -> None:
        super().__init__(state)
        self.state = state


@dataclass(slots=True)
class Directory:
    """A directory that is open, and what is taken from it."""

    descriptor: int
    part: str
    """What a collector approaches it as."""
    owners: set[int] = field(default_factory=set)
    """Users whose files are taken."""
    jobs: set[str] = field(default_factory=set)
    """Those whose processes name it."""


class Directories(dict[tuple[int, int], Directory]):
    """Directories by device and inode: each once, whatever its paths are."""

    def add(self, descriptor: int, part: str) -> Directory:
        """Return the entry of an open directory of the Inspector.

        One that is known under another path stays as it is, and this descriptor is closed.
        """
        status = os.fstat(descriptor)
        known = self.get((status.st_dev, status.st_ino))
        if known is not None:
            os.close(descriptor)
            return known
        return self.setdefault((status.st_dev, status.st_ino), Directory(descriptor, part))


@dataclass(frozen=True, slots=True)
class File:
    """A file that was read."""

    uuid: str
    """Of the GPU, as NVML writes it."""
    owner: int
    """User id."""
    written: float
    """Unix time of its last change."""
    text: str


def names(directory: int) -> list[str]:
    """Return the names of the Inspector's files in an open directory, in order."""
    with os.scandir(directory) as entries:
        return sorted(
            entry.name
            for entry in itertools.islice(entries, MAX_ENTRIES)
            if _NAME.fullmatch(entry.name)
        )


def uuid(name: str) -> str:
    """Return the UUID of the GPU that an Inspector's file is about, as NVML writes it.

    ValueError if the name is not the Inspector's.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        message = f"{name} is no file of the Inspector"
        raise ValueError(message)
    return f"GPU-{match[1]}"


def read(
    directory: int, name: str, owners: Collection[int], oldest: float, newest: float, limit: int
) -> File:
    """Read one of the Inspector's files, if it belongs to one of `owners` and was written between
    `oldest` and `newest`, in Unix time.

    Raises FileRefused, and OSError if it cannot be read. `limit` is in bytes.
    """
    found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    _admit(found, owners, oldest, newest, limit)
    try:
        with assumed(rights_of(found)):
            descriptor = open_entry(directory, name)
    except Irregular as error:
        raise FileRefused(InspectorFileState.IRREGULAR) from error
    try:
        status = os.fstat(descriptor)
        _admit(status, owners, oldest, newest, limit)
        data = read_bytes(descriptor, limit + 1)
    finally:
        os.close(descriptor)
    if len(data) > limit:
        raise FileRefused(InspectorFileState.TOO_LARGE)
    return File(uuid(name), status.st_uid, status.st_mtime, data.decode(errors="replace"))


def _admit(
    status: os.stat_result, owners: Collection[int], oldest: float, newest: float, limit: int
) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise FileRefused(InspectorFileState.IRREGULAR)
    if status.st_uid not in owners:
        raise FileRefused(InspectorFileState.FOREIGN)
    if not oldest <= status.st_mtime <= newest:
        raise FileRefused(InspectorFileState.STALE)
    if status.st_size > limit:
        raise FileRefused(InspectorFileState.TOO_LARGE)
