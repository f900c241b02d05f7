"""Space, inodes and write tests of paths: of this machine, full, read-only and frozen."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from dshealthd.collection.supervisor import STARTS, Supervisor
from dshealthd.collectors import filesystem
from dshealthd.config import registry
from dshealthd.core.collector import Reason
from dshealthd.core.host import Host
from dshealthd.core.options import Duration, Errors, decode, encode
from dshealthd.core.result import CollectionOutcome, CollectionResult
from dshealthd.core.timing import Backoff
from dshealthd.linux.process_root import Root
from tests import frozen
from tests.collectors.bench import Bench, fill, reasons, tmpfs, unprivileged, value, values, write


def failing(result: CollectionResult) -> set[tuple[str, ...]]:
    """Return the paths that fail and why."""
    return set(values(result, filesystem.FAILING))


def mounts(proc: Path, *lines: str) -> None:
    """Have these mounts, each "POINT KIND OPTIONS", in a made-up /proc."""
    rows = enumerate(map(str.split, lines), 20)
    text = "\n".join(
        f"{number} 1 0:{number} / {point} {options} - {kind} none {options}"
        for number, (point, kind, options) in rows
    )
    write(proc, {"1/mountinfo": text})


def test_this_machine() -> None:
    """Sizes and inodes are those that df(1) shows in the same moment."""
    result = Bench("filesystem").collect()
    assert result.outcome is CollectionOutcome.OK
    for path in ("/", "/dev/shm"):
        columns = ["df", "-B1", "--output=size,avail,itotal,fstype,target", path]
        size, available, files, kind, target = subprocess.run(
            columns, check=True, capture_output=True, text=True
        ).stdout.split()[-5:]
        assert value(result, filesystem.SIZE, path) == int(size)
        free = value(result, filesystem.FREE, path)
        assert free is not None
        assert abs(free - int(available)) < 1 << 30
        assert value(result, filesystem.FILES, path) == int(files)
        assert value(result, filesystem.INFO, path, target, kind) == 1
        assert value(result, filesystem.READ_ONLY, path) == 0
        assert value(result, filesystem.WRITABLE, path) is None


def test_missing_path(tmp_path: Path) -> None:
    """A path that is not there is a fault that names it; the others are told all the same."""
    missing = str(tmp_path / "missing")
    result = Bench("filesystem", paths=(missing, "/")).collect()
    assert result.outcome is CollectionOutcome.OK
    assert reasons(result) == {missing: Reason.NOT_FOUND}
    assert failing(result) == {(missing, "not_found")}
    assert value(result, filesystem.SIZE, missing) is None
    assert value(result, filesystem.SIZE, "/") is not None


def test_all_paths_missing(tmp_path: Path) -> None:
    """When no path can be looked at, the collection has failed."""
    result = Bench("filesystem", paths=(str(tmp_path / "missing"),)).collect()
    assert (result.outcome, result.reason) == (CollectionOutcome.ERROR, Reason.NOT_FOUND)


def test_paths_of_a_host_below_a_root(tmp_path: Path) -> None:
    """Paths are looked up below a container's host, by its names and process 1's mounts."""
    with tmpfs(tmp_path / "host", "size=1m,nr_inodes=100"):
        (tmp_path / "host" / "data").mkdir()
        mounts(tmp_path / "proc", "/ ext4 rw", "/data nfs4 ro")
        host = Host(procfs=tmp_path / "proc", rootfs=tmp_path / "host")
        result = Bench("filesystem", host, paths=("/data",)).collect()
    assert value(result, filesystem.SIZE, "/data") == 1 << 20
    assert value(result, filesystem.FILES, "/data") == 100
    assert value(result, filesystem.INFO, "/data", "/data", "nfs4") == 1
    assert value(result, filesystem.READ_ONLY, "/data") == 1


def test_mount_of_a_path_is_looked_up_again(tmp_path: Path) -> None:
    """A change of the mounts is seen at once, another target of a link after a minute."""
    a, b, link = tmp_path / "a", tmp_path / "b", str(tmp_path / "link")
    a.mkdir()
    b.mkdir()
    os.symlink(a, link)
    subject = Bench("filesystem", Host(procfs=tmp_path / "proc"), paths=(link,))
    mounts(tmp_path / "proc", "/ ext4 rw", f"{a} xfs rw", f"{b} nfs4 rw")
    result = subject.collect()
    assert value(result, filesystem.INFO, link, str(a), "xfs") == 1
    assert value(result, filesystem.READ_ONLY, link) == 0
    mounts(tmp_path / "proc", "/ ext4 rw", f"{a} xfs ro", f"{b} nfs4 rw")
    assert value(subject.collect(), filesystem.READ_ONLY, link) == 1
    os.unlink(link)
    os.symlink(b, link)
    assert value(subject.collect(59.0), filesystem.INFO, link, str(a), "xfs") == 1
    result = subject.collect(1.0)
    assert value(result, filesystem.INFO, link, str(b), "nfs4") == 1
    assert value(result, filesystem.READ_ONLY, link) == 0


def test_malformed_mounts(tmp_path: Path) -> None:
    """Mounts that cannot be understood are a fault of their own; space is told all the same."""
    write(tmp_path, {"1/mountinfo": "nonsense"})
    result = Bench("filesystem", Host(procfs=tmp_path), paths=("/",)).collect()
    assert reasons(result) == {"mounts": Reason.MALFORMED}
    assert value(result, filesystem.SIZE, "/") is not None
    assert value(result, filesystem.READ_ONLY, "/") is None


def test_write(tmp_path: Path) -> None:
    """A directory that can be written to is timed, and nothing is left there."""
    path = str(tmp_path)
    subject = Bench("filesystem", write_test=(path,), write_interval=Duration(60))
    leftover = tmp_path / f".dshealthd-write-test-{os.uname().nodename}"
    leftover.write_text("of a worker that was killed")
    result = subject.collect()
    assert value(result, filesystem.WRITABLE, path) == 1
    assert value(result, filesystem.WRITE_SECONDS, path) == 0
    assert not list(tmp_path.iterdir())
    changed = tmp_path.stat().st_mtime_ns
    assert subject.collect(59).samples[-2:] == result.samples[-2:]
    assert tmp_path.stat().st_mtime_ns == changed
    subject.collect(1)
    assert tmp_path.stat().st_mtime_ns > changed


def test_write_does_not_follow_links(tmp_path: Path) -> None:
    """What another user may have put in the place of the test file is removed, never written to."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    directory = tmp_path / "shared"
    directory.mkdir()
    place = directory / f".dshealthd-write-test-{os.uname().nodename}"
    for put in (place.symlink_to, place.hardlink_to):
        put(victim)
        result = Bench("filesystem", write_test=(str(directory),)).collect()
        assert value(result, filesystem.WRITABLE, str(directory)) == 1
        assert victim.read_text() == "precious"


def test_full(tmp_path: Path) -> None:
    """A full file system is not writable for want of space; the test leaves nothing behind."""
    with tmpfs(tmp_path / "full", "size=64k") as full:
        fill(full)
        result = Bench("filesystem", paths=(str(full),), write_test=(str(full),)).collect()
        assert os.listdir(full) == ["ballast"]
    assert value(result, filesystem.FREE, str(full)) == 0
    assert value(result, filesystem.WRITABLE, str(full)) == 0
    assert value(result, filesystem.WRITE_SECONDS, str(full)) is None
    assert failing(result) == {(str(full), "no_space")}
    assert result.outcome is CollectionOutcome.OK


def test_no_inodes(tmp_path: Path) -> None:
    """A file system without free inodes has space and is not writable all the same."""
    with tmpfs(tmp_path / "full", "size=64k,nr_inodes=2") as full:
        (full / "one").touch()
        result = Bench("filesystem", paths=(str(full),), write_test=(str(full),)).collect()
    assert value(result, filesystem.FILES_FREE, str(full)) == 0
    assert value(result, filesystem.FREE, str(full)) == 64 << 10
    assert failing(result) == {(str(full), "no_space")}


def test_more_free_than_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative number of free blocks, which some full file systems give, is no room: a fault."""
    status = list(os.statvfs(tmp_path))
    status[4] = (1 << 64) - 5  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(status))
    result = Bench("filesystem", paths=(str(tmp_path),)).collect()
    assert values(result, filesystem.SIZE)
    assert not values(result, filesystem.FREE)
    assert reasons(result) == {str(tmp_path): Reason.MALFORMED}


def test_unlimited_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CephFS counts its files, and says that all numbers of 64 bits are free: no such limit."""
    status = list(os.statvfs(tmp_path))
    status[5:8] = 1000, (1 << 64) - 1, (1 << 64) - 1  # f_files, f_ffree, f_favail
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(status))
    result = Bench("filesystem", paths=(str(tmp_path),)).collect()
    assert values(result, filesystem.FREE)
    assert not values(result, filesystem.FILES)
    assert not values(result, filesystem.FILES_FREE)
    assert result.faults == ()


def test_no_size(tmp_path: Path) -> None:
    """A file system without a size of its own, such as a tmpfs without a limit, is not full."""
    with tmpfs(tmp_path / "unlimited", "size=0") as unlimited:
        result = Bench("filesystem", paths=(str(unlimited),)).collect()
        with Root.of_process(Host(), os.getpid()) as root:
            assert root.free(str(unlimited)) is None
            assert root.free("/proc") is None
            assert root.free("/") is not None
    assert value(result, filesystem.READ_ONLY, str(unlimited)) == 0
    for metric in (filesystem.SIZE, filesystem.FREE):
        assert value(result, metric, str(unlimited)) is None
    assert result.faults == ()


def test_read_only(tmp_path: Path) -> None:
    """A file system mounted read-only is told from a full one."""
    with tmpfs(tmp_path / "ro", "size=64k,ro") as read_only:
        result = Bench(
            "filesystem", paths=(str(read_only),), write_test=(str(read_only),)
        ).collect()
    assert value(result, filesystem.READ_ONLY, str(read_only)) == 1
    assert failing(result) == {(str(read_only), "read_only")}


def test_permission(tmp_path: Path) -> None:
    """A directory that may not be written to is told from a missing one."""
    shutil.copymode("/tmp", tmp_path)
    missing = tmp_path / "missing"
    result = Bench("filesystem", write_test=(str(missing), "/proc")).collect()
    assert failing(result) == {(str(missing), "not_found"), ("/proc", "not_found")}
    with unprivileged():
        result = Bench("filesystem", write_test=("/usr",)).collect()
    assert failing(result) == {("/usr", "permission_denied")}
    assert value(result, filesystem.WRITABLE, "/usr") == 0


def test_quarantined(tmp_path: Path) -> None:
    """A path that hung is left alone and reported."""
    path = str(tmp_path)
    bench = Bench("filesystem", paths=("/", path), write_test=(path,))
    bench.hung = {"/": Reason.TIMEOUT, f"write {path}": Reason.STUCK}
    result = bench.collect()
    assert result.outcome is CollectionOutcome.OK
    assert reasons(result) == bench.hung
    assert failing(result) == {("/", "timeout"), (path, "stuck")}
    assert value(result, filesystem.SIZE, "/") is None
    assert value(result, filesystem.SIZE, path) is not None
    assert value(result, filesystem.WRITABLE, path) == 0


@pytest.mark.parametrize(("table", "error"), [
    ({"paths": ["data"]}, "x.paths: must be absolute paths"),
    ({"paths": ["/a", "/a"]}, "x.paths: must not name a path twice"),
    ({"write_test": ["~/data"]}, "x.write_test: must be absolute paths"),
])  # fmt: skip
def test_bad_options(table: dict[str, object], error: str) -> None:
    """Paths that mean nothing to a service are refused."""
    errors = Errors()
    decode(filesystem.FilesystemOptions, table, "x", errors)
    assert errors == [error]


async def test_frozen_mount(tmp_path: Path) -> None:
    """FAULT 23: a frozen file system costs one path a worker."""
    with frozen.mounted(tmp_path) as mount:
        path = str(mount.directory)
        options = filesystem.FilesystemOptions(
            paths=("/", path),
            write_test=(path, "/dev/shm"),
            deadline=Duration(0.5),
            write_interval=Duration(0.1),
        )
        hello = {
            "worker": "storage",
            "host": encode(Host()),
            "collectors": {"filesystem": encode(options)},
            "log_level": 50,
        }
        metrics = {"filesystem": registry.metrics(filesystem.Filesystem)}
        deadlines = {"filesystem": 60.0}
        supervisor = Supervisor(
            "storage", hello, deadlines, metrics, time.monotonic, Backoff(0.2, 0.4)
        )
        results: list[CollectionResult] = []

        async def sweep() -> CollectionResult:
            await supervisor.collect(["filesystem"], lambda _name, result: results.append(result))
            return results[-1]

        try:
            result = await sweep()
            assert not result.faults
            assert value(result, filesystem.WRITABLE, path) == 1
            mount.freeze()
            deadlines["filesystem"] = 0.5  # not while a disk is written to, which others use
            await asyncio.sleep(0.2)
            started = time.monotonic()
            for _ in range(5):
                result = await sweep()
                assert result.outcome is CollectionOutcome.OK
                assert failing(result) == {(path, "stuck")}
                assert reasons(result) == {f"write {path}": Reason.STUCK}
                assert value(result, filesystem.WRITABLE, path) == 0
                assert value(result, filesystem.WRITE_SECONDS, path) is None
                assert value(result, filesystem.WRITABLE, "/dev/shm") == 1
                assert value(result, filesystem.SIZE, "/") is not None
                assert value(result, filesystem.SIZE, path) is not None
                await asyncio.sleep(0.2)
            assert time.monotonic() - started < 60
            # One for the first, one in place of the stuck one, no more.
            assert STARTS(2.0, "storage") in [*supervisor.samples()]
            mount.thaw()
            deadlines["filesystem"] = 60.0
            async with asyncio.timeout(60):
                while (result := await sweep()).faults:
                    await asyncio.sleep(0.1)
            assert value(result, filesystem.WRITABLE, path) == 1
            assert not os.listdir(mount.directory) or os.listdir(mount.directory) == ["lost+found"]
        finally:
            mount.thaw()
            await supervisor.close()
