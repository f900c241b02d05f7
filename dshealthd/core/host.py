"""The host as files: where `/proc`, `/sys` and `/dev` are, and how small files are read.

The roots can be moved, as node_exporter's `--path.*` move them: to a container's view of its host,
or to a fixture.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dshealthd.core.options import option

_CHUNK = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Host:
    """Roots of the file systems that describe a machine.

    Paths are given to its methods relative to a root.
    """

    procfs: Path = option(Path("/proc"), "Where procfs is mounted.")
    sysfs: Path = option(Path("/sys"), "Where sysfs is mounted.")
    dev: Path = option(Path("/dev"), "Where the device files are.")
    rootfs: Path = option(
        Path("/"),
        "Where the host's root file system is; absolute paths of the config are looked up "
        "below it.",
    )

    def proc(self, path: str) -> str:
        """Return the place of a file below `/proc`."""
        return f"{self.procfs}/{path}"

    def sys(self, path: str) -> str:
        """Return the place of a file below `/sys`."""
        return f"{self.sysfs}/{path}"

    def device(self, path: str) -> str:
        """Return the place of a file below `/dev`."""
        return f"{self.dev}/{path}"

    def root(self, path: str) -> str:
        """Return the place of an absolute path of the host."""
        return os.path.join(self.rootfs, path.lstrip("/"))


def read(place: str, limit: int = 1 << 20) -> str:
    """Return the text of a small file, at most `limit` bytes; undecodable bytes are replaced.

    Raises OSError as `open(2)` and `read(2)` do.
    """
    return read_bytes(place, limit).decode(errors="replace")


def read_bytes(place: str, limit: int = 1 << 20) -> bytes:
    """Return the content of a small file, at most `limit` bytes, in as few system calls as the
    kernel allows.
    """
    descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        chunks = []
        while limit > 0:
            chunk = os.read(descriptor, min(limit, _CHUNK))
            if not chunk:
                break
            chunks.append(chunk)
            limit -= len(chunk)
    finally:
        os.close(descriptor)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def integer(place: str, text: str | bytes, base: int = 10) -> int:
    """Return the integer that a file of the kernel holds; ValueError names the file otherwise."""
    try:
        return int(text, base)
    except ValueError as error:
        message = f"{place}: {text[:40]!r} is no number"
        raise ValueError(message) from error


def read_int(place: str) -> int:
    """Return the integer that a file holds, decimal or 0x…; OSError, or ValueError with its name."""
    return integer(place, read(place).strip(), 0)
