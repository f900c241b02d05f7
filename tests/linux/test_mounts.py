"""Mount points from mountinfo."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dshealthd.linux.mounts import Mount, mount_of, parse_mountinfo

TEXT = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
25 22 0:23 / /dev/shm rw,nosuid,nodev shared:4 master:1 - tmpfs tmpfs rw,size=65536k
31 22 0:41 / /mnt/my\\040data ro,relatime - nfs4 10.0.0.5:/export rw,vers=4.2
32 22 259:1 / /scratch rw,noatime - xfs /dev/nvme0n1 ro,attr2
33 22 259:2 / /scratch rw,noatime - ext4 /dev/nvme1n1 rw
"""


def test_mounts() -> None:
    """Escapes are undone; read-only is seen whether the mount or its file system is."""
    assert parse_mountinfo(TEXT) == [
        Mount("/", "ext4", False),  # noqa: FBT003 - a row of the table
        Mount("/dev/shm", "tmpfs", False),  # noqa: FBT003
        Mount("/mnt/my data", "nfs4", True),  # noqa: FBT003
        Mount("/scratch", "xfs", True),  # noqa: FBT003
        Mount("/scratch", "ext4", False),  # noqa: FBT003
    ]


@pytest.mark.parametrize(("path", "kind"), [
    ("/", "ext4"),
    ("/dev/shm", "tmpfs"),
    ("/dev/shm/nccl", "tmpfs"),
    ("/dev/shmem", "ext4"),
    ("/mnt/my data/checkpoints", "nfs4"),
    ("/scratch/a", "ext4"),
])  # fmt: skip
def test_mount_of(path: str, kind: str) -> None:
    """A path lies on the longest mount point above it, and of several at one place on the last."""
    found = mount_of(path, parse_mountinfo(TEXT))
    assert found is not None
    assert found.kind == kind


@pytest.mark.parametrize("text", ["nonsense", "22 1 254:0 / / rw,relatime", "1 2 - ext4"])
def test_malformed(text: str) -> None:
    """What is no mount is refused."""
    with pytest.raises(ValueError, match="not a mount"):
        parse_mountinfo(text)


def test_this_machine() -> None:
    """Every mount point of this machine is found as the mount of itself."""
    mounts = parse_mountinfo(Path("/proc/self/mountinfo").read_text())
    assert {mount.point for mount in mounts if os.path.ismount(mount.point)}
    for mount in mounts:
        found = mount_of(mount.point, mounts)
        assert found is not None
        assert found.point == mount.point
