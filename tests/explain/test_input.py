"""Logs of every form and size, and hostile ones."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dshealthd.explain import command
from dshealthd.explain import input as logs
from tests.explain.explaining import explained_files, explained_paths, peak_memory

FULL = "OSError: [Errno 28] No space left on device: '/ckpt/x.pt'"

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total"


def slug(path: Path | str) -> str:
    """Explain one path."""
    recognizer, _ = command.read([str(path)])
    return command.conclude(recognizer).slug


def test_files_folders_patterns_and_compressions(tmp_path: Path) -> None:
    """By content and not by name: plain, gz, xz and bz2 are the same log; of zst it is said how."""
    data = f"step 1\n{OOM}\n".encode()
    forms = {"a.log": data, "b.log": gzip.compress(data), "c": lzma.compress(data)}
    forms["d.txt"] = bz2.compress(data)
    for name, value in forms.items():
        (tmp_path / name).write_bytes(value)
        assert slug(tmp_path / name) == "cuda-oom"
    assert slug(tmp_path) == "cuda-oom"
    assert slug(tmp_path / "*.log") == "cuda-oom"
    (tmp_path / "e.log").write_bytes(b"\x28\xb5\x2f\xfd")
    with pytest.raises(logs.InputError, match="zstdcat"):
        slug(tmp_path / "e.log")


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    """A FIFO, a device and a file of the kernel among the logs are named, and block nothing."""
    (tmp_path / "log").write_text(f"{OOM}\n")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "kernel").symlink_to("/proc/self/status")
    recognizer, unread = command.read([str(tmp_path / "*")])
    assert command.conclude(recognizer).slug == "cuda-oom"
    assert all(line.endswith("is not a regular file") for line in unread)
    named = [line.removeprefix(f"not read: {tmp_path}/").split()[0].rstrip(":") for line in unread]
    assert named == ["fifo", "kernel", "zero"]


def test_folders_that_hold_nothing_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which nothing is known: no answer that there is no failure. One of several is named."""

    def closed(path: str) -> object:
        if os.path.basename(path) == "closed":
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    scandir = os.scandir
    (tmp_path / "closed").mkdir()
    (tmp_path / "empty").touch()
    for name in ("closed", "empty"):
        with pytest.raises(logs.InputError, match=f"{name}: nothing to read"):
            slug(tmp_path / name)
    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(logs.InputError, match="closed: Permission denied"):
        slug(tmp_path / "closed")
    (tmp_path / "log").write_text(f"{OOM}\n")
    recognizer, unread = command.read([str(tmp_path)])
    assert command.conclude(recognizer).slug == "cuda-oom"
    assert unread == [f"not read: {tmp_path}/closed: Permission denied"]
    for name, why in (("none", "no such file"), ("log/none", "Not a directory")):
        with pytest.raises(logs.InputError, match=f"{name}: {why}"):
            slug(tmp_path / name)


def test_a_pipe_of_the_shell(tmp_path: Path) -> None:
    """`dshealthd explain <(zstdcat LOG)` reads the pipe that the shell has opened."""
    path = tmp_path / "log"
    path.write_text(f"{OOM}\n")
    with subprocess.Popen(["/bin/cat", str(path)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert slug(f"/dev/fd/{child.stdout.fileno()}") == "cuda-oom"


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress, bz2.compress])
@pytest.mark.parametrize(("first", "outcome"), [(OOM, "found"), ("a line", "undecided")])
def test_a_compressed_log_that_was_cut_is_read_as_far_as_it_goes(
    compress: Callable[[bytes], bytes], first: str, outcome: str, tmp_path: Path
) -> None:
    """A job that is killed leaves half a stream; the failure may stand in the other half."""
    values = random.Random(0)
    lines = "".join(f"{values.random()}\n" for _ in range(200_000))
    data = compress(f"{first}\n{lines}".encode())
    (tmp_path / "job").write_bytes(data[: len(data) // 2])
    recognizer, unread = command.read([str(tmp_path)])
    assert command.conclude(recognizer, unread).outcome == outcome
    assert f"not read to its end: {tmp_path}/job: Compressed file ended" in unread[0]


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"\xff\xfe\x00 " + OOM.encode() + b"\n", "replaced"),
        (b"x" * 3_000_000 + b"\n" + OOM.encode() + b"\n", "cut"),
        (OOM.encode() + b"\0\0" + b"\n", ""),
        (b"  1%| | 1/9 [00:01<00:09]\r 2%| | 2/9 [00:02<00:08]\r" + OOM.encode() + b"\n", ""),
        (b"a\r\n" + OOM.encode() + b"\r\n", ""),
    ],
)
def test_odd_bytes(data: bytes, field: str, tmp_path: Path) -> None:
    """Wrong encodings, NULs, huge lines and progress bars hide nothing, and are counted."""
    (tmp_path / "job.out").write_bytes(data)
    recognizer, _ = command.read([str(tmp_path)])
    assert command.conclude(recognizer).slug == "cuda-oom"
    if field:
        assert getattr(recognizer.found.statistics, field) > 0


@pytest.mark.parametrize(
    ("data", "outcome"),
    [
        (random.Random(0).randbytes(100_000), "undecided"),
        (Path(sys.executable).read_bytes()[:1_000_000], "undecided"),
        ("步骤 1 完成\n".encode("gbk") * 99, "nothing"),
        ("étape 1\n".encode("latin-1") * 99, "nothing"),
        ("step 1\n".encode("utf-16"), "nothing"),
        (bytes(1 << 16) + b"\x1b[32mstep 1\x1b[0m\r\n" * 99, "nothing"),
        (b"step 1\n" * 50 + b"step \x01\n" * 50, "nothing"),
        (b"step 1\n" * 50 + b"step \x01\n" * 51, "undecided"),
    ],
)
def test_what_is_no_text_is_said_to_be_none(data: bytes, outcome: str, tmp_path: Path) -> None:
    """A checkpoint or a program in place of a log is no run that went well."""
    (tmp_path / "job.out").write_bytes(data)
    recognizer, unread = command.read([str(tmp_path)])
    assert unread == [f"not text: {tmp_path}/job.out"] * (outcome == "undecided")
    assert command.conclude(recognizer, unread).outcome == outcome


def test_long_names_take_no_time() -> None:
    """A folder's random name of many letters cost minutes in the expression for host names."""
    start = time.thread_time()
    for name in ("a" * 4000, "a-" * 2000, "a1" * 2000, "tmp4o_xk" * 500, "1.a" * 1300):
        explained_files({f"/tmp/{name}/{name}.gz": [FULL]})
    assert time.thread_time() - start < 2


@pytest.mark.parametrize(("before", "is_read"), [(15, True), (17, False)])
def test_the_edges_of_a_log_are_always_read(before: int, tmp_path: Path, *, is_read: bool) -> None:
    """A rank introduces itself in the first 16 KiB, in words that no failure has."""
    chatter = ("it is a fine day" * 63 + "\n") * 1000
    who = "rank=5 host=gpu-7 local_rank=1 pid=71\n"
    path = tmp_path / "job.out"
    path.write_text(chatter[: before << 10] + "\n" + who + chatter + f"[rank5]: {FULL}\n")
    assert (explained_paths(path).host == "gpu-7") == is_read


@pytest.mark.parametrize(
    ("before", "after", "is_read"),
    [(1000, None, True), (1100, None, False), (None, 4000, True), (None, 4200, False)],
)
def test_what_stands_around_a_failure_is_read(
    before: int | None, after: int | None, tmp_path: Path, *, is_read: bool
) -> None:
    """A KiB before it and four after it, whatever it says."""
    chatter, who = "fine\n" * 20_000, "rank=5 host=gpu-7 local_rank=1 pid=71\n"
    lines = [chatter, who * (before is not None), chatter[: before or 0], f"[rank5]: {FULL}\n"]
    lines += [chatter[: after or 0], who * (after is not None), chatter]
    path = tmp_path / "job.out"
    path.write_text("".join(lines))
    assert (explained_paths(path).host == "gpu-7") == is_read


def test_so_many_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so much of a line."""
    monkeypatch.chdir(tmp_path)
    for size in (1 << 16, (1 << 16) + 1):
        Path("log").write_text("x" * size + "\n")
        recognizer, _ = command.read(["log"])
        assert recognizer.found.statistics.cut == size - (1 << 16)
    names = ["./" * one + "/" * other + "log" for one in range(1, 143) for other in range(142)]
    assert len(logs.expand(names[:20_000])) == 20_000
    with pytest.raises(logs.InputError, match="more than 20,000 files"):
        logs.expand(names[:20_001])


def test_line_numbers_are_those_of_the_file(tmp_path: Path) -> None:
    """A claim's proof can be looked up, far into a file of which most lines were left out."""
    for before in (0, 1, 999, 70_001):
        path = tmp_path / "job.out"
        path.write_text("".join(f"step {n} of it\n" for n in range(before)) + f"{OOM}\n")
        finding = explained_paths(path)
        assert finding.proof[0].line == before + 1


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    """200 MB of which every line is another one take no more than 64 MiB above an empty log."""
    empty, large = tmp_path / "empty", tmp_path / "large"
    empty.write_text("step 1\n")
    block = b"".join(
        b"[rank0]: tensor " + os.urandom(30).hex().encode() + b"\n" for _ in range(9000)
    )
    with large.open("wb") as file:
        for _ in range(40):
            file.write(block + b"one line " + b"y" * 2_000_000 + b"\n")
    assert peak_memory(large) - peak_memory(empty) < 64 << 20


def test_exit_statuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 nothing found, 1 found, 3 undecided, 64 usage; of text and JSON alike."""
    (tmp_path / "ok").write_text("step 1\n")
    (tmp_path / "oom").write_text(f"{OOM}\n")
    (tmp_path / "after").write_text(
        "[rank1]:[E1 10:00:00.1 ProcessGroupNCCL.cpp:1] [Rank 1] Some NCCL operations have failed "
        "or timed out.\n"
    )
    for name, status in (("ok", 0), ("oom", 1), ("after", 3)):
        assert command.main([str(tmp_path / name)]) == status
        assert command.main(["--json", str(tmp_path / name)]) == status
    assert command.main([str(tmp_path / "none")]) == 64
    with pytest.raises(SystemExit) as error:
        command.main([])
    assert error.value.code == 64
    capsys.readouterr()


def test_what_a_good_run_says_too_is_no_cause(tmp_path: Path) -> None:
    """`--healthy` takes out the error that every run of this program prints, whether or not a
    pattern knows it.
    """
    good, bad = tmp_path / "good", tmp_path / "bad"
    for usual in ("ModuleNotFoundError: No module named 'apex'", "The queue lost spindle 3"):
        good.write_text(f"{usual}\nstep 1\n")
        for more, found in ((FULL, "disk-full"), ("", "")):
            bad.write_text(f"{usual.replace('3', '4')}\n{more}\n")
            recognizer, _ = command.read([str(bad)], [str(good)])
            assert command.conclude(recognizer).slug == found
            assert {event.slug for event in recognizer.found.events} == {found} - {""}
        assert slug(bad)
