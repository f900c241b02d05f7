"""Why the kernel refuses is told from what it says."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from dshealthd.core.host import Host
from dshealthd.jobs.launches.obstacle import Obstacle, refused_by_kernel


@pytest.mark.parametrize(
    ("code", "lockdown", "reason"),
    [
        (errno.EPERM, "none integrity [confidentiality]", Obstacle.LOCKDOWN),
        (errno.EPERM, "none [integrity] confidentiality", Obstacle.DENIED),
        (errno.EACCES, None, Obstacle.DENIED),
        (errno.EINVAL, "none integrity [confidentiality]", Obstacle.UNSUPPORTED),
        (errno.ENOSYS, None, Obstacle.UNSUPPORTED),
    ],
)
def test_why(code: int, lockdown: str | None, reason: Obstacle, tmp_path: Path) -> None:
    """Denied and locked down are told apart, and neither is a missing feature."""
    if lockdown is not None:
        (tmp_path / "kernel/security").mkdir(parents=True)
        (tmp_path / "kernel/security/lockdown").write_text(lockdown)
    error = OSError(code, "bpf: what it says")
    refused = refused_by_kernel(Host(sysfs=tmp_path), error, "maps")
    assert (refused.reason, refused.detail) == (reason, "maps: bpf: what it says")
