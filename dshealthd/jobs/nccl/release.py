"""NCCL releases that a running process has mapped, and the variables that they read.

The sources are `/proc/<pid>/maps` and the text that each of these libraries prints at startup, a
constant of the build: "NCCL version 2.27.7+cuda12.9". A file's name is less reliable, since anybody
can rename a file; it counts only if the constants say nothing. NCCL that is linked into PyTorch is
in `libtorch_cuda.so`.

The file is opened below the process's own root with the rights of its user, checked before it is
opened, and compared with the mapping. A package that was upgraded under a running job is not what
runs, and then the release is unknown.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from dshealthd.core.host import Host, Signature, read_bytes, signature
from dshealthd.linux.elf import constants
from dshealthd.linux.process_root import Root

MAPS_LIMIT = 16 << 20
"""Bytes; a process that has loaded torch and CUDA has one or two MiB."""
_RELEASE = re.compile(r"[0-9]+\.[0-9]+[0-9A-Za-z.+-]{0,32}")
_LIBRARY = re.compile(
    rb" (\d+) +((?:/[^\n]*/|/)(?:libnccl\.so[0-9.]*|libtorch[a-z_]*\.so))( \(deleted\))?$",
    re.MULTILINE,
)
"""The end of a line of `maps` that names a library: inode, path, and whether that is deleted."""
_FILE_NAME = re.compile(r"libnccl\.so\.([0-9]+\.[0-9]+\.[0-9]+)")
_BANNER = re.compile(
    rb"NCCL version ([0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}[!-*,-~]{0,24})(?:\+cuda| compiled with)"
)
"""Both NCCL texts with the version: the startup banner, and that of its RAS."""
_VARIABLE = re.compile(rb"\0(NCCL_[A-Z0-9_]{2,64})(?=\0)")
"""A constant that is exactly the name of a variable."""
MAX_VARIABLES = 4096
"""Names of one library after which the search stops; NCCL 2.30 has 250."""
_OVERLAP = 128
"""Bytes of one piece that are searched again with the next; longer than any banner."""
MAX_KNOWN = 64
"""Most libraries, of all jobs of a node, that are remembered."""
MAX_LIBRARIES = 8
"""Most libraries of one process that are read; one, or two with PyTorch's, is usual."""


class Mapping(NamedTuple):
    """A library in the address space of a process."""

    path: str
    """Path as the process sees it."""
    inode: int
    deleted: bool

    @property
    def is_nccl(self) -> bool:
        """Whether it is NCCL's own library."""
        return "/libnccl.so" in self.path

    @property
    def may_contain_nccl(self) -> bool:
        """Whether it is NCCL, or torch's library that NCCL may be linked into."""
        return self.is_nccl or self.path.endswith("/libtorch_cuda.so")


class Library(NamedTuple):
    """What the constants of a library reveal."""

    versions: frozenset[str]
    """NCCL versions; empty if it names none."""
    variables: frozenset[str]
    """Names of the environment variables that it reads, and few others."""


class UnknownRelease(Exception):
    """A process has mapped an NCCL of unknown release; the message says why."""


def release_numbers(release: str) -> tuple[int, ...]:
    """Return the first three numbers of an NCCL release, without a vendor's suffix."""
    return tuple(int(number) for number in re.findall(r"\d+", release)[:3])


def release(text: str) -> str:
    """Return `text` if it is a version of NCCL; otherwise empty."""
    return text if _RELEASE.fullmatch(text) else ""


def without_build(version: str) -> str:
    """Return a version of NCCL without a build's suffix."""
    return version.partition("+")[0].partition("-")[0]


def parse_maps(data: bytes) -> tuple[Mapping, ...]:
    """Return NCCL's and torch's libraries in `/proc/<pid>/maps`."""
    lines = dict.fromkeys(_LIBRARY.findall(data))  # several lines are of one file
    return tuple(
        Mapping(os.fsdecode(path), int(inode), bool(deleted)) for inode, path, deleted in lines
    )


@contextlib.contextmanager
def opened(host: Host, pid: int, mapping: Mapping) -> Iterator[int]:
    """Yield a descriptor of a library that a process has mapped.

    `UnknownRelease` if that was replaced on disk, OSError.
    """
    if mapping.deleted:
        raise UnknownRelease(f"{mapping.path} was replaced while the process was running")
    with Root.of_process(host, pid) as root:
        descriptor = root.open(mapping.path)
    try:
        if os.fstat(descriptor).st_ino != mapping.inode:
            raise UnknownRelease(f"{mapping.path} is another file than the mapped one")
        yield descriptor
    finally:
        os.close(descriptor)


def read_library(descriptor: int, name: str) -> Library:
    """Return the NCCL versions and variables among the constants of an open library.

    `name` is its file name. OSError.
    """
    versions: set[str] = set()
    variables: set[str] = set()
    before = b""
    for chunk in constants(descriptor):
        text = before + chunk
        versions.update(match.decode() for match in _BANNER.findall(text))
        if len(variables) < MAX_VARIABLES:
            variables.update(match.decode() for match in _VARIABLE.findall(text))
        before = chunk[-_OVERLAP:]
    if not versions and (match := _FILE_NAME.fullmatch(name)):
        versions.add(match[1])
    return Library(frozenset(versions), frozenset(variables))


class MappedReleases:
    """A reader of the releases of processes, which caches each file's until the file changes."""

    def __init__(self) -> None:
        self._known: dict[Signature, Library] = {}

    def library(self, host: Host, pid: int) -> Library:
        """Return the versions and variables of all NCCL that a process has mapped; none if it has
        mapped none.

        `UnknownRelease` if a version is unknown, OSError if the process cannot be read.
        """
        maps = read_bytes(host.proc(f"{pid}/maps"), MAPS_LIMIT)
        if len(maps) >= MAPS_LIMIT:
            raise UnknownRelease(f"the process has more than {MAPS_LIMIT} bytes of mappings")
        mappings = [mapping for mapping in parse_maps(maps) if mapping.may_contain_nccl]
        if len(mappings) > MAX_LIBRARIES:
            raise UnknownRelease(f"the process has mapped more than {MAX_LIBRARIES} NCCL libraries")
        others = not any(mapping.is_nccl for mapping in mappings)
        versions: set[str] = set()
        variables: set[str] = set()
        for mapping in mappings:
            library = self._library(host, pid, mapping)
            if not library.versions and (mapping.is_nccl or others):
                raise UnknownRelease(f"{mapping.path} does not say its NCCL version")
            versions |= library.versions
            variables |= library.variables
        return Library(frozenset(versions), frozenset(variables))

    def _library(self, host: Host, pid: int, mapping: Mapping) -> Library:
        with opened(host, pid, mapping) as descriptor:
            key = signature(os.fstat(descriptor))
            if key not in self._known:
                if len(self._known) >= MAX_KNOWN:
                    self._known.clear()
                self._known[key] = read_library(descriptor, os.path.basename(mapping.path))
            return self._known[key]
