"""The files of NCCL's Inspector by name, owner and age.

These are other users' files, in directories that these users can write to. So only a regular file
of the user whose job writes it is opened, with that user's rights.
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
from dshealthd.linux.process_files import rights_of
from dshealthd.linux.regular_files import Irregular, open_entry
from dshealthd.linux.regular_files import read as read_bytes

if TYPE_CHECKING:
    from collections.abc import Collection

MAX_ENTRIES = 20_000
"""Most entries of a directory that are read."""
_NAME = re.compile(r"nccl_inspector_metrics_([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.prom")


class InspectorFileState(enum.StrEnum):
    """What happens with a file."""

    TAKEN = "taken"
    STALE = "stale"
    """It was last written too long ago, or in the future: its numbers are not current."""
    ELSEWHERE = "elsewhere"
    """It is another node's, in a directory that nodes share."""
    FOREIGN = "foreign"
    """Its owner may not write there for the job."""
    IRREGULAR = "irregular"
    """It is a link, a FIFO, a device or a directory."""
    TOO_LARGE = "too_large"
    UNREADABLE = "unreadable"
    LEFT_OUT = "left_out"
    """It exceeds max_files."""


class FileRefused(Exception):
    """A file that is not taken; `state` says why."""

    def __init__(self, state: InspectorFileState) -> None:
        super().__init__(state)
        self.state = state


@dataclass(slots=True)
class Directory:
    """An open directory, and whose files are taken from it."""

    descriptor: int
    part: str
    """Its name as a part that the collector enters."""
    owners: set[int] = field(default_factory=set)
    """Users whose files are taken."""
    jobs: set[str] = field(default_factory=set)
    """Jobs whose processes name it."""


class Directories(dict[tuple[int, int], Directory]):
    """Directories by device and inode, so that each occurs once, whatever its paths."""

    def add(self, descriptor: int, part: str) -> Directory:
        """Return the entry of an open Inspector directory.

        If it is known under another path, that entry stays and this descriptor is closed.
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
    """UUID of the GPU, in NVML's form."""
    owner: int
    """User id of the file's owner."""
    written: float
    """Unix time of the file's last change."""
    text: str


def names(directory: int) -> list[str]:
    """Return the names of the Inspector files in an open directory, in order."""
    with os.scandir(directory) as entries:
        return sorted(
            entry.name
            for entry in itertools.islice(entries, MAX_ENTRIES)
            if _NAME.fullmatch(entry.name)
        )


def uuid(name: str) -> str:
    """Return the UUID of the GPU that an Inspector file is about, in NVML's form.

    ValueError if the name is not the Inspector's.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        message = f"{name} is not an Inspector file"
        raise ValueError(message)
    return f"GPU-{match[1]}"


def read(
    directory: int, name: str, owners: Collection[int], oldest: float, newest: float, limit: int
) -> File:
    """Read an Inspector file, if it belongs to one of `owners` and was written between `oldest` and
    `newest`, in Unix time.

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
