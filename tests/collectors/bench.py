"""A collector on a machine of a test's own making, collected sweep by sweep."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dshealthd.config import registry
from dshealthd.core.collector import Context, Fault, Metric, Reason, Sample
from dshealthd.core.exposition import render
from dshealthd.core.host import Host
from dshealthd.core.result import CollectionResult, attempt
from tests.processes import wait_for_environment

FIXTURES = Path(__file__).parent / "fixtures"
Values = dict[tuple[str, ...], float]


def host(base: Path) -> Host:
    """Return a host whose trees are below a directory."""
    return Host(procfs=base / "proc", sysfs=base / "sys", dev=base / "dev", rootfs=base / "root")


def copied(name: str, directory: Path) -> Path:
    """Return a copy of a collector's fixture, to change."""
    return Path(shutil.copytree(FIXTURES / name, directory / name, symlinks=True))


def write(base: Path, files: Mapping[str, str]) -> None:
    """Write files, each on a line of its own, and the directories above them."""
    for path, text in files.items():
        (base / path).parent.mkdir(parents=True, exist_ok=True)
        (base / path).write_text(f"{text}\n")


@contextlib.contextmanager
def child(program: str, *arguments: str, **how: Any) -> Iterator[int]:
    """Run a program of Python to its end, and keep the process; its pid."""
    command = [sys.executable, "-c", f"{program}\nprint(flush=True); input()", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **how) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.communicate(b"\n", timeout=60)


@contextlib.contextmanager
def sleeper(
    user: int, variables: Mapping[str, str] | None = None, cwd: Path | str = "/"
) -> Iterator[int]:
    """Run a process of a user that does nothing, with these variables; its pid."""
    rights: Any = {} if os.geteuid() else {"user": user, "group": user, "extra_groups": []}
    with subprocess.Popen(["/bin/sleep", "600"], env=variables, cwd=cwd, **rights) as process:
        try:
            wait_for_environment(process.pid)
            yield process.pid
        finally:
            process.kill()


@contextlib.contextmanager
def tmpfs(directory: Path, options: str) -> Iterator[Path]:
    """Mount a tmpfs, or skip where mounting is not permitted."""
    directory.mkdir(exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", directory], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting is not permitted here: {mounted.stderr.decode().strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


def fill(directory: Path) -> None:
    """Leave no space in a directory's file system: `ballast` has it."""
    with (
        contextlib.suppress(OSError),
        (directory / "ballast").open("wb", buffering=0) as ballast,
    ):
        while ballast.write(b"x" * 4096):
            pass


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Act as a user without privileges."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


class Bench:
    """A collector by its name; its clock stands still until it is moved."""

    def __init__(
        self,
        name: str,
        where: Host | Path | None = None,
        *arguments: object,
        services: tuple[object, ...] = (),
        **options: Any,
    ) -> None:
        """`where` is a host, or a directory as `host` takes it; this machine by default."""
        self.now = 1000.0
        self.clock: Callable[[], float] = lambda: self.now
        self.entered: list[str] = []
        self.hung: dict[str, Reason] = {}
        """Parts under quarantine, and why."""
        kind: Any = registry.load(name)
        self.context = Context(
            host=host(where) if isinstance(where, Path) else where or Host(),
            monotonic=lambda: self.clock(),  # noqa: PLW0108 - a test may set another
            wall=time.time,
            entering=self._enter,
            services=services,
        )
        self.collector = kind(kind.Options(**options), self.context, *arguments)

    def _enter(self, part: str) -> Fault | None:
        self.entered.append(part)
        return Fault(part, self.hung[part], "it hung") if part in self.hung else None

    def collect(self, seconds: float = 0.0) -> CollectionResult:
        """Collect in a new sweep, so many seconds later."""
        self.now += seconds
        self.context.sweep += 1
        return attempt(self.collector, self.clock)


class Reader:
    """Reads files, notes which, and refuses those that it is told to, by the end of their path."""

    def __init__(self, read: Callable[[str], Any]) -> None:
        self._read = read
        self.refused: dict[str, int] = {}
        """The error number of each."""
        self.answers: dict[str, Any] = {}
        """What to say in place of a file's content."""
        self.seen: list[str] = []

    def __call__(self, place: str) -> Any:
        """Return the content of a file; OSError."""
        self.seen.append(place)
        for end, number in self.refused.items():
            if place.endswith(end):
                raise OSError(number, os.strerror(number), place)
        return next(
            (text for end, text in self.answers.items() if place.endswith(end)), None
        ) or self._read(place)

    def count(self, end: str) -> int:
        """Return how often files with this end were read."""
        return sum(place.endswith(end) for place in self.seen)


def values(result: CollectionResult, metric: Metric) -> Values:
    """Return the values of a metric by its labels."""
    return {sample.labels: sample.value for sample in result.samples if sample.metric is metric}


def value(result: CollectionResult, metric: Metric, *labels: str) -> float | None:
    """Return the value of one series; None if it is absent."""
    return values(result, metric).get(labels)


def named(result: CollectionResult, prefix: str = "") -> Values:
    """Return all values by the rest of their metric's name, and their labels."""
    return {
        (sample.metric.name.removeprefix(f"dshealthd_{prefix}"), *sample.labels): sample.value
        for sample in result.samples
    }


def exposed(samples: Iterable[Sample]) -> str:
    """Return the exposition of samples, without what the declarations of their metrics say."""
    lines = render(samples).splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("#"))


def reasons(result: CollectionResult) -> dict[str, Reason]:
    """Return why each part could not be read."""
    return {fault.part: fault.reason for fault in result.faults}
