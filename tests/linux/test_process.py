"""Processes as the kernel shows them: daemons by name and owner, in a `/proc` of the test's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dshealthd.core.host import Host
from dshealthd.linux.process import daemon


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """Return a machine whose processes can be seen, of which none is a daemon."""
    process(tmp_path, 2, "kthreadd", os.geteuid())
    return Host(procfs=tmp_path)


def process(procfs: Path, pid: int, name: str, owner: int) -> None:
    """Add a process."""
    place = procfs / str(pid)
    place.mkdir()
    (place / "comm").write_text(f"{name}\n")
    os.chown(place, owner, owner)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives processes to others")
@pytest.mark.parametrize(
    ("comm", "owner", "found"),
    [
        ("nv-fabricmanage", 0, 70),  # the kernel cuts the name
        ("nv-fabricmanager", 0, None),
        ("nv-fabric", 0, None),
        ("nv-fabricmanage", 999, 70),
        ("nv-fabricmanage", 1000, None),  # a user can pick any name
    ],
)
def test_name_and_owner(host: Host, comm: str, owner: int, found: int | None) -> None:
    """Fifteen bytes of its name, of the system or an account below those of people."""
    process(host.procfs, 70, comm, owner)
    assert daemon(host, "nv-fabricmanager") == found
    assert daemon(host, "nv-fabricmanager", 70) == found
    assert daemon(host, "nv-fabricmanager", 71) == found


def test_processes_that_cannot_be_seen(host: Host) -> None:
    """A container, or hidepid: a daemon may run all the same."""
    process(host.procfs, 70, "nvlsm", os.geteuid())
    (host.procfs / "2/comm").write_text("bash\n")
    with pytest.raises(PermissionError, match="cannot be seen"):
        daemon(host, "nvlsm")
