"""Mount points from `/proc/<pid>/mountinfo`, and those that users' processes serve (FUSE)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.core.host import lines_of, read

if TYPE_CHECKING:
    from collections.abc import Sequence

_ESCAPE = re.compile(r"\\([0-7]{3})")
_SERVED = re.compile(rb"^(\d{1,10}) .* - fuse[^ ]* .*\buser_id=([1-9]\d{0,9})", re.MULTILINE)
_MOUNT_ID = re.compile(r"^mnt_id:\s*(\d+)$", re.MULTILINE)


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
            message = f"not a mount: {line[:80]!r}"
            raise ValueError(message)
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


def parse_served_by_users(mountinfo: bytes) -> dict[int, int]:
    """Return the user of each mount that a user's process serves, by mount ID."""
    return {int(mount): int(user) for mount, user in _SERVED.findall(mountinfo)}


def mount_id(descriptor: int) -> int:
    """Return the ID of a descriptor's mount, without a request to its file system. OSError."""
    # statx(2) and fstatfs(2) would ask the process that serves it.
    match = _MOUNT_ID.search(read(f"/proc/self/fdinfo/{descriptor}"))
    return int(match[1]) if match else -1
