"""Processes as the kernel shows them: daemons by name and owner, memory."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from pathlib import Path

import pytest

from dshealthd.core.host import Host
from dshealthd.linux.process import daemon, exit_status, read_memory


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


@pytest.mark.parametrize(("others", "content"), [(16_383, b"x"), (16_384, b"")])
def test_mappings_that_are_looked_at(tmp_path: Path, others: int, content: bytes) -> None:
    """A user can make any number of them."""
    (tmp_path / "maps").write_text("0-1 r--p 0 08:01 5\n" * others + "1-2 rw-p 0 00:00 0\n")
    (tmp_path / "mem").write_bytes(b"-x")
    assert read_memory(str(tmp_path), 1, 1) == content


@pytest.mark.parametrize(("known", "found"), [(0x3F, -9), (0x37, None)])
def test_the_status_of_a_process_that_was_reaped(
    monkeypatch: pytest.MonkeyPatch, known: int, found: int | None
) -> None:
    """As Linux tells it since 6.15: in the last of 64 bytes, if the fourth bit says so."""

    def ioctl(_descriptor: int, request: int, info: bytearray) -> None:
        assert (request, len(info), info[0]) == (0xC040FF0B, 64, 0x08)
        info[0] = known
        info[60:] = (-9).to_bytes(4, "little", signed=True)

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    assert exit_status(7) == found


def test_memory(tmp_path: Path) -> None:
    """What is mapped from a file is not read, as its pages may never come; nor is a hole."""
    (tmp_path / "file").write_bytes(b"in a file")
    place = f"/proc/{os.getpid()}"
    with (
        open(tmp_path / "file", "rb") as file,
        mmap.mmap(
            file.fileno(), 9, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        ) as mapped,
        mmap.mmap(-1, 9, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as anonymous,
    ):
        anonymous[:] = b"in memory"
        for memory, content in ((anonymous, b"in memory"), (mapped, b"")):
            first = ctypes.c_char.from_buffer(memory)
            assert read_memory(place, ctypes.addressof(first), 9) == content
            del first
    assert read_memory(place, 0, 9) == b""
