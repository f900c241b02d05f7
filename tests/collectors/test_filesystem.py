"""Space, inodes and write tests of paths.

On this machine's file systems, on full, read-only and frozen ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from dshealthd.collection.supervisor import Supervisor
from dshealthd.collectors import filesystem
from dshealthd.config import registry
from dshealthd.core.collector import Context, Fault, Metric, Reason
from dshealthd.core.host import Host
from dshealthd.core.options import Duration, Errors, decode, encode
from dshealthd.core.result import CollectionOutcome, Result, attempt
from dshealthd.core.timing import Backoff
from tests import frozen
from tests.jobs.machines import Clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def collector(
    options: filesystem.FilesystemOptions,
    clock: Callable[[], float] = time.monotonic,
    host: Host | None = None,
    hung: dict[str, Fault] | None = None,
) -> filesystem.Filesystem:
    """Return a collector; the parts in `hung` are under quarantine."""
    context = Context(host=host or Host(), monotonic=clock, entering=(hung or {}).get)
    return filesystem.Filesystem(options, context)


def collect(subject: filesystem.Filesystem) -> Result:
    """Collect once."""
    return attempt(subject)


def value(result: Result, metric: Metric, *labels: str) -> float | None:
    """Return the value of a series, None if it is not there."""
    return {
        sample.labels: sample.value for sample in result.samples if sample.metric is metric
    }.get(labels)


def reasons(result: Result) -> set[tuple[str, ...]]:
    """Return the paths that fail and why."""
    return {sample.labels for sample in result.samples if sample.metric is filesystem.FAILING}


@contextlib.contextmanager
def tmpfs(directory: Path, options: str) -> Iterator[Path]:
    """Mount a tmpfs, or skip where mounting is not permitted."""
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", directory], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting is not permitted here: {mounted.stderr.decode().strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


def test_this_machine() -> None:
    """Sizes and inodes are those that df(1) shows in the same moment."""
    result = collect(collector(filesystem.FilesystemOptions()))
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
    result = collect(collector(filesystem.FilesystemOptions(paths=(missing, "/"))))
    assert result.outcome is CollectionOutcome.OK
    assert [(fault.part, fault.reason) for fault in result.faults] == [(missing, Reason.NOT_FOUND)]
    assert reasons(result) == {(missing, "not_found")}
    assert value(result, filesystem.SIZE, missing) is None
    assert value(result, filesystem.SIZE, "/") is not None


def test_all_paths_missing(tmp_path: Path) -> None:
    """When no path can be looked at, the collection has failed."""
    result = collect(collector(filesystem.FilesystemOptions(paths=(str(tmp_path / "missing"),))))
    assert (result.outcome, result.reason) == (CollectionOutcome.ERROR, Reason.NOT_FOUND)


def test_paths_of_a_host_below_a_root(tmp_path: Path) -> None:
    """In a container, paths are looked up below the host's root and named as the host names them.

    Mounts are those of process 1.
    """
    with tmpfs(tmp_path / "host", "size=1m,nr_inodes=100"):
        (tmp_path / "host" / "data").mkdir()
        (tmp_path / "proc" / "1").mkdir(parents=True)
        (tmp_path / "proc" / "1" / "mountinfo").write_text(
            "22 1 254:0 / / rw - ext4 /dev/vda rw\n23 22 0:41 / /data ro - nfs4 filer:/x rw\n"
        )
        host = Host(procfs=tmp_path / "proc", rootfs=tmp_path / "host")
        result = collect(collector(filesystem.FilesystemOptions(paths=("/data",)), host=host))
    assert value(result, filesystem.SIZE, "/data") == 1 << 20
    assert value(result, filesystem.FILES, "/data") == 100
    assert value(result, filesystem.INFO, "/data", "/data", "nfs4") == 1
    assert value(result, filesystem.READ_ONLY, "/data") == 1


def mounts(proc: Path, *lines: str) -> None:
    """Have these mounts, each "POINT KIND OPTIONS", in a made-up /proc."""
    (proc / "1").mkdir(parents=True, exist_ok=True)
    (proc / "1" / "mountinfo").write_text(
        "".join(
            f"{number} 1 0:{number} / {point} {options} - {kind} none {options}\n"
            for number, (point, kind, options) in enumerate(map(str.split, lines), 20)
        )
    )


def test_mount_of_a_path_is_looked_up_again(tmp_path: Path) -> None:
    """A change of the mounts is seen at once, another target of a link after a minute."""
    a, b, link = tmp_path / "a", tmp_path / "b", str(tmp_path / "link")
    a.mkdir()
    b.mkdir()
    os.symlink(a, link)
    clock = Clock()
    options = filesystem.FilesystemOptions(paths=(link,))
    subject = collector(options, clock, Host(procfs=tmp_path / "proc"))
    mounts(tmp_path / "proc", "/ ext4 rw", f"{a} xfs rw", f"{b} nfs4 rw")
    result = collect(subject)
    assert value(result, filesystem.INFO, link, str(a), "xfs") == 1
    assert value(result, filesystem.READ_ONLY, link) == 0
    mounts(tmp_path / "proc", "/ ext4 rw", f"{a} xfs ro", f"{b} nfs4 rw")
    assert value(collect(subject), filesystem.READ_ONLY, link) == 1
    os.unlink(link)
    os.symlink(b, link)
    clock.now += filesystem.LOCATE
    result = collect(subject)
    assert value(result, filesystem.INFO, link, str(b), "nfs4") == 1
    assert value(result, filesystem.READ_ONLY, link) == 0


def test_malformed_mounts(tmp_path: Path) -> None:
    """Mounts that cannot be understood are a fault of their own; space is told all the same."""
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "mountinfo").write_text("nonsense\n")
    result = collect(
        collector(filesystem.FilesystemOptions(paths=("/",)), host=Host(procfs=tmp_path))
    )
    assert [(fault.part, fault.reason) for fault in result.faults] == [("mounts", Reason.MALFORMED)]
    assert value(result, filesystem.SIZE, "/") is not None
    assert value(result, filesystem.READ_ONLY, "/") is None


def test_write(tmp_path: Path) -> None:
    """A directory that can be written to is timed, and nothing is left there."""
    clock = Clock()
    path = str(tmp_path)
    subject = collector(
        filesystem.FilesystemOptions(write_test=(path,), write_interval=Duration(60)), clock
    )
    leftover = tmp_path / f".dshealthd-write-test-{os.uname().nodename}"
    leftover.write_text("of a worker that was killed")
    result = collect(subject)
    assert value(result, filesystem.WRITABLE, path) == 1
    assert value(result, filesystem.WRITE_SECONDS, path) == 0
    assert not list(tmp_path.iterdir())
    changed = tmp_path.stat().st_mtime_ns
    clock.now += 59
    assert collect(subject).samples[-2:] == result.samples[-2:]
    assert tmp_path.stat().st_mtime_ns == changed
    clock.now += 1
    collect(subject)
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
        result = collect(collector(filesystem.FilesystemOptions(write_test=(str(directory),))))
        assert value(result, filesystem.WRITABLE, str(directory)) == 1
        assert victim.read_text() == "precious"


def test_full(tmp_path: Path) -> None:
    """A full file system is not writable for want of space; the test leaves nothing behind."""
    with tmpfs(tmp_path / "full", "size=64k") as full:
        with contextlib.suppress(OSError), (full / "ballast").open("wb", buffering=0) as ballast:
            while ballast.write(b"x" * 4096):
                pass
        result = collect(
            collector(filesystem.FilesystemOptions(paths=(str(full),), write_test=(str(full),)))
        )
        assert os.listdir(full) == ["ballast"]
    assert value(result, filesystem.FREE, str(full)) == 0
    assert value(result, filesystem.WRITABLE, str(full)) == 0
    assert value(result, filesystem.WRITE_SECONDS, str(full)) is None
    assert reasons(result) == {(str(full), "no_space")}
    assert result.outcome is CollectionOutcome.OK


def test_no_inodes(tmp_path: Path) -> None:
    """A file system without free inodes has space and is not writable all the same."""
    with tmpfs(tmp_path / "full", "size=64k,nr_inodes=2") as full:
        (full / "one").touch()
        result = collect(
            collector(filesystem.FilesystemOptions(paths=(str(full),), write_test=(str(full),)))
        )
    assert value(result, filesystem.FILES_FREE, str(full)) == 0
    assert value(result, filesystem.FREE, str(full)) == 64 << 10
    assert reasons(result) == {(str(full), "no_space")}


def test_read_only(tmp_path: Path) -> None:
    """A file system mounted read-only is told from a full one."""
    with tmpfs(tmp_path / "ro", "size=64k,ro") as read_only:
        result = collect(
            collector(
                filesystem.FilesystemOptions(paths=(str(read_only),), write_test=(str(read_only),))
            )
        )
    assert value(result, filesystem.READ_ONLY, str(read_only)) == 1
    assert reasons(result) == {(str(read_only), "read_only")}


def test_permission(tmp_path: Path) -> None:
    """A directory that may not be written to is told from a missing one."""
    shutil.copymode("/tmp", tmp_path)
    missing = tmp_path / "missing"
    result = collect(collector(filesystem.FilesystemOptions(write_test=(str(missing), "/proc"))))
    assert reasons(result) == {(str(missing), "not_found"), ("/proc", "not_found")}
    if os.geteuid() == 0:
        os.seteuid(65534)
    try:
        result = collect(collector(filesystem.FilesystemOptions(write_test=("/usr",))))
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
    assert reasons(result) == {("/usr", "permission_denied")}
    assert value(result, filesystem.WRITABLE, "/usr") == 0


def test_quarantined(tmp_path: Path) -> None:
    """A path that hung is left alone and reported."""
    path = str(tmp_path)
    hung = {
        "/": Fault("/", Reason.TIMEOUT, "hung"),
        f"write {path}": Fault(f"write {path}", Reason.STUCK, "hung"),
    }
    result = collect(
        collector(filesystem.FilesystemOptions(paths=("/", path), write_test=(path,)), hung=hung)
    )
    assert result.outcome is CollectionOutcome.OK
    assert list(result.faults) == list(hung.values())
    assert reasons(result) == {("/", "timeout"), (path, "stuck")}
    assert value(result, filesystem.SIZE, "/") is None
    assert value(result, filesystem.SIZE, path) is not None
    assert value(result, filesystem.WRITABLE, path) == 0


@pytest.mark.parametrize(
    ("table", "error"),
    [
        ({"paths": ["data"]}, "x.paths: must be absolute paths"),
        ({"paths": ["/a", "/a"]}, "x.paths: must not name a path twice"),
        ({"write_test": ["~/data"]}, "x.write_test: must be absolute paths"),
    ],
)
def test_bad_options(table: dict[str, object], error: str) -> None:
    """Paths that mean nothing to a service are refused."""
    errors = Errors()
    decode(filesystem.FilesystemOptions, table, "x", errors)
    assert errors == [error]


def test_frozen_mount(tmp_path: Path) -> None:
    """FAULT 23: a frozen file system costs one path a worker."""

    async def main(mount: frozen.Mount) -> None:
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
        supervisor = Supervisor(
            "storage", hello, {"filesystem": 0.5}, metrics, time.monotonic, Backoff(0.2, 0.4)
        )
        results: list[Result] = []

        async def sweep() -> Result:
            await supervisor.collect(["filesystem"], lambda _name, result: results.append(result))
            return results[-1]

        try:
            result = await sweep()
            assert not result.faults
            assert value(result, filesystem.WRITABLE, path) == 1
            mount.freeze()
            await asyncio.sleep(0.2)
            started = time.monotonic()
            for _ in range(5):
                result = await sweep()
                assert result.outcome is CollectionOutcome.OK
                assert reasons(result) == {(path, "stuck")}
                assert [(fault.part, fault.reason) for fault in result.faults] == [
                    (f"write {path}", Reason.STUCK)
                ]
                assert value(result, filesystem.WRITABLE, path) == 0
                assert value(result, filesystem.WRITE_SECONDS, path) is None
                assert value(result, filesystem.WRITABLE, "/dev/shm") == 1
                assert value(result, filesystem.SIZE, "/") is not None
                assert value(result, filesystem.SIZE, path) is not None
                await asyncio.sleep(0.2)
            assert time.monotonic() - started < 10
            starts = {sample.metric.name: sample.value for sample in supervisor.samples()}[
                "dshealthd_worker_starts_total"
            ]
            assert starts == 2, "one for the first, one in place of the stuck one, no more"
            mount.thaw()
            deadline = time.monotonic() + 10
            while (result := await sweep()).faults:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.1)
            assert value(result, filesystem.WRITABLE, path) == 1
            assert not os.listdir(mount.directory) or os.listdir(mount.directory) == ["lost+found"]
        finally:
            mount.thaw()
            await supervisor.close()

    with frozen.mounted(tmp_path) as mount:
        asyncio.run(main(mount))
