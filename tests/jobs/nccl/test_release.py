"""The release of NCCL that a process has mapped."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from dshealthd.core.host import Host
from dshealthd.jobs.nccl.release import (
    Library,
    MappedReleases,
    Mapping,
    UnknownRelease,
    parse_maps,
    read_library,
    release,
)
from tests.jobs.elf import library

CHUNK = 1 << 20

BANNER = b"\0NCCL version 2.27.7+cuda12.9\0"
MAP = (
    "import mmap, os, sys\nfiles = [os.open(path, os.O_RDONLY) for path in sys.argv[1:]]\nheld = "
    "[mmap.mmap(file, 0, access=mmap.ACCESS_READ) for file in "
    "files]\nprint(flush=True)\nsys.stdin.read()\n"
)


@pytest.fixture
def start() -> Iterator[Callable[..., int]]:
    """Start processes that map files, and return their pids."""
    started = []

    def begin(*paths: Path) -> int:
        process = subprocess.Popen(
            [sys.executable, "-c", MAP, *map(str, paths)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid

    yield begin
    for process in started:
        process.communicate()


@pytest.mark.parametrize(("length", "is_one"), [(32, True), (33, False)])
def test_how_long_a_release_is(length: int, *, is_one: bool) -> None:
    """A longer text is none."""
    text = "2.30" + "a" * length
    assert release(text) == (text if is_one else "")


def mapped(pid: int, procfs: Path = Path("/proc")) -> frozenset[str]:
    """Return the versions that a process has mapped."""
    return MappedReleases().library(Host(procfs=procfs), pid).versions


def test_maps() -> None:
    """Libraries of NCCL and PyTorch's part that may contain it, with what tells them apart."""
    data = (
        b"7f00-7f01 r--p 00000000 fe:00 77 /a b/libnccl.so.2.27.7\n"
        b"7f01-7f02 r-xp 00001000 fe:00 77 /a b/libnccl.so.2.27.7\n"
        b"7f02-7f03 r--p 00000000 fe:00 78 /t/libtorch_cuda.so (deleted)\n"
        b"7f03-7f04 r--p 00000000 fe:00 79 /t/libnccl-net.so\n"
        b"7f03-7f04 r--p 00000000 fe:00 80           /libnccl.so\n"
        b"7f04-7f05 rw-p 00000000 00:00 0 \n"
    )
    assert parse_maps(data) == (
        Mapping("/a b/libnccl.so.2.27.7", 77, deleted=False),
        Mapping("/t/libtorch_cuda.so", 78, deleted=True),
        Mapping("/libnccl.so", 80, deleted=False),
    )


@pytest.mark.parametrize(("name", "text", "version"), [
    # What the build wrote into the library counts, not what the file is called.
    ("libnccl.so.2.30.7", BANNER, "2.27.7"),
    ("libnccl.so.2", b"NCCL version 2.29.3-own+cuda13.0", "2.29.3-own"),
    # Across two pieces of reading.
    ("libtorch_cuda.so", b"\0" * (CHUNK - 20) + BANNER, "2.27.7"),
    # Where the constants say nothing, the name of the file does.
    ("libnccl.so.2.26.2", b"nothing", "2.26.2"),
])  # fmt: skip
def test_version(
    start: Callable[..., int], tmp_path: Path, name: str, text: bytes, version: str
) -> None:
    """The release is found among the constants of the library, or in its name."""
    library(tmp_path / name, text)
    assert mapped(start(tmp_path / name)) == {version}


def test_two_libraries(start: Callable[..., int], tmp_path: Path) -> None:
    """A process with two releases has both; PyTorch's part without NCCL in it adds none."""
    places = [
        tmp_path / "a/libnccl.so.2",
        tmp_path / "b/libnccl.so.2",
        tmp_path / "libtorch_cuda.so",
    ]
    for place, text in zip(places, (BANNER, b"NCCL version 2.30.7+cuda13.0", b""), strict=True):
        library(place, text)
    assert mapped(start(*places)) == {"2.27.7", "2.30.7"}


def test_nothing_mapped(start: Callable[..., int]) -> None:
    """A process that has not mapped NCCL has no release, which is not an unknown one."""
    assert mapped(start()) == frozenset()


def test_replaced_library(start: Callable[..., int], tmp_path: Path) -> None:
    """An upgrade under a running job leaves the release unknown, whatever lies there now."""
    place = tmp_path / "libnccl.so.2"
    library(place, BANNER)
    pid, releases = start(place), MappedReleases()
    assert releases.library(Host(), pid).versions == {"2.27.7"}
    library(tmp_path / "new", b"NCCL version 2.30.7+cuda13.0")
    os.replace(tmp_path / "new", place)
    with pytest.raises(UnknownRelease, match="replaced"):
        releases.library(Host(), pid)


def test_other_file_at_the_path(tmp_path: Path) -> None:
    """A file that is not the one that is mapped says nothing of the process."""
    place = tmp_path / "libnccl.so.2"
    library(place, BANNER)
    proc = tmp_path / "proc/self"
    proc.mkdir(parents=True)
    for name in ("root", "cwd", "status", "auxv"):
        (proc / name).symlink_to(f"/proc/self/{name}")
    inode = place.stat().st_ino + 1
    (proc / "maps").write_text(f"7f00-7f01 r--p 00000000 fe:00 {inode} {place}\n")
    (tmp_path / "proc/7").symlink_to(proc)
    with pytest.raises(UnknownRelease, match="another file"):
        mapped(7, tmp_path / "proc")


@pytest.mark.parametrize(("known", "kept"), [(63, 64), (64, 1)])
def test_so_many_libraries_are_remembered(
    start: Callable[..., int], tmp_path: Path, known: int, kept: int
) -> None:
    """As many as all jobs of a node have; then anew."""
    library(tmp_path / "libnccl.so.2", BANNER)
    releases = MappedReleases()
    releases._known = {(number,): Library(frozenset(), frozenset()) for number in range(known)}
    assert releases.library(Host(), start(tmp_path / "libnccl.so.2")).versions == {"2.27.7"}
    assert len(releases._known) == kept


@pytest.mark.parametrize(("size", "known"), [((16 << 20) - 1, True), (16 << 20, False)])
def test_so_many_mappings(tmp_path: Path, size: int, *, known: bool) -> None:
    """Of a process with more it is not known what it has mapped."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7/maps").write_bytes(b"\n" * size)
    with nullcontext() if known else pytest.raises(UnknownRelease, match="bytes of mappings"):
        assert mapped(7, tmp_path) == frozenset()


@pytest.mark.parametrize(("count", "whole"), [(4095, True), (4096, False)])
def test_so_many_variables(tmp_path: Path, count: int, *, whole: bool) -> None:
    """No NCCL has thousands: a library made of names does not fill the memory."""
    names = b"".join(b"\0NCCL_%d" % number for number in range(1000, 1000 + count))
    library(tmp_path / "libnccl.so.2", names.ljust(2 * CHUNK, b"\0") + b"\0NCCL_LAST\0")
    with open(tmp_path / "libnccl.so.2", "rb") as file:
        variables = read_library(file.fileno(), "").variables
    assert (len(variables), "NCCL_LAST" in variables) == (4096, whole)


@pytest.mark.parametrize(("count", "known"), [(8, True), (9, False)])
def test_so_many_libraries(
    start: Callable[..., int], tmp_path: Path, count: int, *, known: bool
) -> None:
    """Nobody maps more than eight; who does, to keep us busy, is unknown."""
    places = [tmp_path / str(number) / "libnccl.so.2" for number in range(count)]
    for place in places:
        library(place, BANNER)
    with nullcontext() if known else pytest.raises(UnknownRelease, match="more than 8"):
        assert mapped(start(*places)) == {"2.27.7"}


def test_library_without_a_version(start: Callable[..., int], tmp_path: Path) -> None:
    """A library that says no version is not known: nobody is asked on a guess."""
    for name in ("libnccl.so.2", "libtorch_cuda.so"):
        library(tmp_path / name, b"NCCL version %s and no digits")
        with pytest.raises(UnknownRelease, match="does not say its NCCL version"):
            mapped(start(tmp_path / name))
