"""The child that touches the disk of `path.state`, where it cannot be started."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dshealthd.core import background, state_file
from dshealthd.core.child import StartError
from dshealthd.core.state_writer import StateFile
from tests.waiting import until


def test_no_child_is_not_a_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that is gone is a StartError, as a missing file would mean that there is no
    state.
    """
    place = tmp_path / "x.json"
    place.write_bytes(b"{}")
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", "/nonexistent/python")
        with pytest.raises(StartError, match=f"the process for {place} .*'/nonexistent/python'"):
            state_file.read_in_child(str(place), 10)
        with pytest.raises(StartError, match=f"the process for {tmp_path} cannot be started"):
            state_file.names_in_child(str(tmp_path))
    assert state_file.read_in_child(str(place), 10) == b"{}"


@pytest.mark.parametrize(("mebibytes", "is_read"), [(200, True), (300, False)])
def test_the_memory_of_a_child(tmp_path: Path, mebibytes: int, *, is_read: bool) -> None:
    """A quarter of a GiB: the file may have any size."""
    place = tmp_path / "x.json"
    place.write_bytes(b"{}")
    with contextlib.nullcontext() if is_read else pytest.raises(OSError):  # noqa: PT011
        assert state_file.read_in_child(str(place), mebibytes << 20) == b"{}"


async def test_without_a_directory_nothing_is_kept() -> None:
    """What is saved goes nowhere, and there is no past."""
    file = StateFile(None, "x", 10)
    file.save("{}")
    assert await file.load() is None


async def test_a_disk_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the file, and for how long it was waited for."""

    async def call(*_call: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(background, "call", call)
    with pytest.raises(TimeoutError, match=rf"does not answer within 2 s: '{tmp_path}/x.json'"):
        await StateFile(tmp_path, "x", 10).load()


@pytest.mark.timeout(10)
@pytest.mark.parametrize("durable", [False, True])
def test_what_others_put_in_place_of_the_temporary_file(tmp_path: Path, *, durable: bool) -> None:
    """A FIFO does not hang the write, and neither a link's nor a hard link's target is written."""
    place, temporary, victim = tmp_path / "x", tmp_path / "x.new", tmp_path / "victim"
    victim.write_bytes(b"theirs")
    os.mkfifo(temporary)
    state_file.replace(place, b"1", durable=durable)
    assert place.read_bytes() == b"1"
    temporary.symlink_to(victim)
    state_file.replace(place, b"2", durable=durable)
    assert place.read_bytes() == b"2"
    temporary.hardlink_to(victim)
    state_file.replace(place, b"3", durable=durable)
    assert place.read_bytes() == b"3"
    assert victim.read_bytes() == b"theirs"
    assert not temporary.exists()


def test_old_file_stays(tmp_path: Path) -> None:
    """When the new file cannot be put in place, the old one is as it was."""
    place = tmp_path / "x"
    state_file.replace(place, b"1", durable=False)
    (tmp_path / "x.new").mkdir()
    with pytest.raises(OSError, match=r"x\.new"):
        state_file.replace(place, b"2", durable=False)
    assert place.read_bytes() == b"1"
    (tmp_path / "x.new").rmdir()
    state_file.replace(place, b"2", durable=False)
    assert place.read_bytes() == b"2"


WRITER = """
import sys
from dshealthd.core.state_file import replace
number = 0
while True:
    replace(sys.argv[1], b"%d" % number * 4000, durable=sys.argv[2] == "True")
    number = (number + 1) % 10
"""


@pytest.mark.parametrize("durable", [False, True])
def test_a_writer_that_is_killed_leaves_a_whole_file(tmp_path: Path, *, durable: bool) -> None:
    """Whenever that is: what was there before, or what is new."""
    draw, place = random.Random(4), tmp_path / "x"
    for _ in range(4):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(place), str(durable)]) as writer:
            until(place.exists)
            time.sleep(draw.uniform(0, 0.05))
            writer.kill()
        content = place.read_bytes()
        assert content == content[:1] * 4000
        place.unlink()


@pytest.mark.timeout(10)
def test_only_files_are_read(tmp_path: Path) -> None:
    """A FIFO, also one with a writer, and a link are errors, in the child too."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert state_file.read(tmp_path / "file", 3) == b"123"
    for name in ("fifo", "link"):
        with pytest.raises(OSError, match=name):
            state_file.read(tmp_path / name, 3)
        with pytest.raises(OSError, match=name):
            state_file.read_in_child(str(tmp_path / name), 3)
    writer = os.open(tmp_path / "fifo", os.O_RDWR)
    with pytest.raises(OSError, match="not a regular file"):
        state_file.read(tmp_path / "fifo", 3)
    os.close(writer)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """Where the new file cannot be put in place, it does not stay beside the old one."""
    (tmp_path / "x").mkdir()
    with pytest.raises(IsADirectoryError):
        state_file.replace(tmp_path / "x", b"1", durable=False)
    assert os.listdir(tmp_path) == ["x"]


def test_what_a_child_does_to_a_disk_is_an_error_or_done(tmp_path: Path) -> None:
    """Files are replaced, read in part, set aside; directories made; errors keep their type."""
    folder = str(tmp_path / "a")
    place = f"{folder}/b"
    with pytest.raises(FileNotFoundError):
        state_file.replace_in_child(place, b"x")
    for _ in range(2):
        state_file.make_directory_in_child(folder)
    assert not Path(folder).stat().st_mode & 0o027
    with pytest.raises(FileNotFoundError):
        state_file.read_in_child(place, 10)
    with pytest.raises(FileNotFoundError):
        state_file.set_aside_in_child(place)
    with pytest.raises(IsADirectoryError):
        state_file.replace_in_child(folder, b"1")
    state_file.replace_in_child(place, b"0123456789", durable=True)
    assert Path(place).stat().st_mode & 0o777 == 0o644
    assert state_file.read_in_child(place, 4) == b"0123"
    state_file.set_aside_in_child(place)
    assert Path(f"{place}.bad").read_bytes() == b"0123456789"
    Path(f"{folder}/\udcff").touch()
    assert sorted(state_file.names_in_child(folder)) == ["b.bad", "\udcff"]
    with pytest.raises(NotADirectoryError):
        state_file.names_in_child(f"{place}.bad")


@pytest.mark.parametrize(("flags", "code"), [(os.ST_RDONLY, errno.EROFS), (0, errno.EACCES)])
def test_a_directory_where_no_file_can_be_created(
    flags: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there, and of no use: as its file system is read-only, or another user's."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=flags))
    with pytest.raises(OSError, match=os.strerror(code)):
        state_file.make_directory(str(tmp_path))
