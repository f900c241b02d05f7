"""A file that was changed is seen to have changed, however it was."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dshealthd.core.host import read, read_bytes, read_existing, read_named, signatures

MIB = 1 << 20


def rewrite(file: Path) -> None:
    """Write as many bytes in place and set the time of modification back, as `cp -p` may."""
    before = file.stat()
    file.write_bytes(b"new")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_mtime_ns, file.stat().st_size) == (before.st_mtime_ns, before.st_size)


def replace(file: Path) -> None:
    """Put another file in its place."""
    other = file.with_name("other")
    other.write_bytes(file.read_bytes())
    other.replace(file)


@pytest.mark.parametrize(
    "change", [rewrite, replace, lambda file: file.chmod(0o600), lambda file: file.unlink()]
)
def test_every_change_is_seen(tmp_path: Path, change: Callable[[Path], object]) -> None:
    """Content, mode, another file of the same content, none: each differs from before."""
    file = tmp_path / "file"
    file.write_bytes(b"old")
    file.chmod(0o644)
    before = signatures([file])
    assert signatures([file]) == before
    time.sleep(0.02)  # before Linux 6.13 changes of one tick of the kernel's bear the same time
    change(file)
    assert signatures([file]) != before


def test_a_file_that_is_not_there_is_none(tmp_path: Path) -> None:
    """What cannot be looked at is a state of its own, which ends when the file appears."""
    assert signatures([tmp_path, tmp_path / "none"])[1] is None


@pytest.mark.parametrize("size", [MIB, MIB + 1])
def test_small_files_are_read_to_a_limit(tmp_path: Path, size: int) -> None:
    """A mebibyte, whatever somebody has put there."""
    file = tmp_path / "file"
    file.write_bytes(b"x" * size)
    for function in (read, read_bytes, read_existing):
        assert len(function(str(file)) or "") == MIB
    assert len(read(str(file), 10)) == 10


@pytest.mark.parametrize("more", [0, 1])
def test_named_files_are_read_whole_or_not(tmp_path: Path, more: int) -> None:
    """Up to 16 MiB."""
    file = tmp_path / "file"
    with file.open("wb") as sparse:
        sparse.truncate(16 * MIB + more)
    with pytest.raises(OSError, match="longer than") if more else contextlib.nullcontext():
        assert len(read_named(file)) == 16 * MIB


@pytest.mark.timeout(60)
def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    """To open a FIFO would wait for a writer."""
    os.mkfifo(tmp_path / "fifo")
    for place in (tmp_path / "fifo", tmp_path, "/dev/null"):
        with pytest.raises(OSError, match="not a regular file"):
            read_named(place)
