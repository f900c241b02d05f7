"""FUSE mounts that processes of users serve: `sshfs` and the like, mounted with `fusermount`.

Its user stops such a process at will, and whoever is waiting for an answer then cannot be killed.
Without `allow_other` the kernel keeps everybody else out, with it the agent would wait. A mount that
root serves is infrastructure like any network file system. One from another user namespace the
kernel keeps the agent out of.
"""

from __future__ import annotations

import re

from dshealthd.core.host import read

_SERVED = re.compile(rb"^(\d+) .* - fuse[^ ]* .*\buser_id=([1-9]\d*)", re.MULTILINE)
_MOUNT_ID = re.compile(r"^mnt_id:\s*(\d+)$", re.MULTILINE)


def parse_served_by_users(mountinfo: bytes) -> dict[int, int]:
    """Return the user of each mount that a user's process serves, by mount ID."""
    return {int(mount): int(user) for mount, user in _SERVED.findall(mountinfo)}


def mount_id(descriptor: int) -> int:
    """Return the ID of a descriptor's mount, without a request to its file system. OSError."""
    # statx(2) and fstatfs(2) would ask the process that serves it.
    match = _MOUNT_ID.search(read(f"/proc/self/fdinfo/{descriptor}", 4096))
    return int(match[1]) if match else -1
