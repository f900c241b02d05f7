"""Mount points from `/proc/<pid>/mountinfo`, and those that users' processes serve (FUSE)."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Sequence
from typing import NamedTuple

from dshealthd.core.host import lines_of, read

_ESCAPE = re.compile(r"\\([0-7]{3})")
_FUSE = re.compile(
    rb"^(\d{1,10}) \d+ (\d+:\d+) .* - fuse[^ ]* .*\buser_id=(\d{1,10})", re.MULTILINE
)
_EMPTY_PATH, _DONT_SYNC, _MOUNT_ID = 0x1000, 0x4000, 0x1000
"""AT_EMPTY_PATH, AT_STATX_DONT_SYNC and STATX_MNT_ID (Linux 5.8)."""
_STATX = struct.Struct("=I140xQ")
"""`stx_mask` and `stx_mnt_id` of a `struct statx`."""
_IN_FDINFO = re.compile(r"^mnt_id:\s*(\d+)$", re.MULTILINE)
_libc = ctypes.CDLL(None)


class Mount(NamedTuple):
    """One mounted file system."""

    point: str
    """Where it is mounted, an absolute path."""
    kind: str
    """Type of the file system: ext4, nfs4, lustre, …"""
    read_only: bool
    """Mounted read-only, or remounted read-only after an error."""


def parse_mountinfo(text: str) -> list[Mount]:
    """Return the mounts, later ones over earlier ones. ValueError. See proc_pid_mountinfo(5)."""
    mounts = []
    for line in lines_of(text):
        place, separator, rest = line.partition(" - ")
        before, after = place.split(" "), rest.split(" ")
        # the fields of the format
        if not separator or len(before) < 6 or len(after) < 3:  # noqa: PLR2004
            raise ValueError(f"not a mount: {line[:80]!r}")
        point = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), before[4])
        read_only = "ro" in before[5].split(",") or "ro" in after[2].split(",")
        mounts.append(Mount(point, after[0], read_only))
    return mounts


def mount_of(path: str, mounts: Sequence[Mount]) -> Mount | None:
    """Return the mount that contains an absolute path without symbolic links."""
    best: Mount | None = None
    for mount in mounts:
        inside = mount.point in ("/", path) or path.startswith(f"{mount.point}/")
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


class FuseMount(NamedTuple):
    """A mount that a process serves."""

    mount: int
    """Its ID."""
    device: bytes
    """The same of all mounts of one file system."""
    user: int
    """Who mounted it, by the numbers of the user namespace in which that was done."""


def parse_fuse(mountinfo: bytes) -> list[FuseMount]:
    """Return the mounts that processes serve."""
    return [
        FuseMount(int(mount), device, int(user)) for mount, device, user in _FUSE.findall(mountinfo)
    ]


def mount_id(descriptor: int) -> int:
    """Return the ID of a descriptor's mount, without a request to its file system; -1 if the kernel
    does not tell. OSError.
    """
    found = ctypes.create_string_buffer(256)  # struct statx
    if not _libc.statx(descriptor, b"", _EMPTY_PATH | _DONT_SYNC, _MOUNT_ID, found):
        mask, mount = _STATX.unpack_from(found)
        if mask & _MOUNT_ID:
            return int(mount)
    # Who acts with a user's rights may not read this before Linux 5.14 (proc: fdinfo is 0500).
    match = _IN_FDINFO.search(read(f"/proc/self/fdinfo/{descriptor}"))
    return int(match[1]) if match else -1
