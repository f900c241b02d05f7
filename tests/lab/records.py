"""What a lab has made, on disk, so that `python -m tests.lab --clean` can remove what a killed lab
left.

One file per lab in a folder of the user's own. A process is known by its pid, start time and boot,
so none is ended that merely has the number of one of the lab's. Interfaces, addresses, firewall
rules, shapers and mounts need no undoing of their own: they exist only in namespaces that live as
long as their process 1, which is recorded.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_PREFIX = "dshealthd-lab-"


def folder() -> Path:
    """Return the folder of this user's records."""
    path = Path(tempfile.gettempdir()) / f"{_PREFIX}records-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.is_symlink() or path.stat().st_uid != os.getuid():
        message = f"{path} belongs to another user"
        raise PermissionError(message)
    return path


def start_time(pid: int) -> int | None:
    """Return when a process started, in ticks since boot.

    None when there is none, or only its remains.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


class Records:
    """The records of one lab that runs in this process."""

    def __init__(self, directory: Path, *, temporary: bool) -> None:
        """Open a file for a lab in `directory`, which is removed with it where it is `temporary`."""
        self.path = folder() / f"{os.getpid()}-{time.monotonic_ns()}.json"
        self._content: dict[str, Any] = {
            "boot": _boot(),
            "lab": [os.getpid(), start_time(os.getpid())],
            "directory": str(directory),
            "temporary": temporary,
            "processes": [],
            "faults": [],
        }
        self._write()

    def process(self, what: str, pid: int) -> None:
        """Note a process that was started; those that have ended since are forgotten."""
        self._content["processes"] = [
            entry for entry in self._content["processes"] if start_time(entry[1]) == entry[2]
        ]
        self._content["processes"].append([what, pid, start_time(pid)])
        self._write()

    @contextlib.contextmanager
    def fault(self, what: str) -> Iterator[None]:
        """Note a fault while it lasts."""
        self._content["faults"].append(what)
        self._write()
        try:
            yield
        finally:
            self._content["faults"].remove(what)
            self._write()

    def close(self) -> None:
        """Remove the file and, where it is temporary, the lab's directory: nothing is left."""
        _discard(self.path, self._content)

    def _write(self) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self._content), encoding="utf-8")
        new.replace(self.path)


def clean(directory: Path | None = None) -> list[str]:
    """End what labs left that no longer run, or only the one of a directory, and say what that was.

    A lab that runs is left alone.
    """
    said = []
    for path in sorted(folder().glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue  # its lab has just ended
        if directory is not None and content["directory"] != str(directory):
            continue
        same_boot = content["boot"] == _boot()
        pid, started = content["lab"]
        if same_boot and start_time(pid) == started:
            said.append(f"{content['directory']}: left alone, its lab runs as process {pid}")
            continue
        left = [
            entry
            for entry in content["processes"]
            if same_boot and start_time(entry[1]) == entry[2]
        ]
        for what, pid, _ in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # ends stopped processes too
            said.append(f"{content['directory']}: {what}, process {pid}")
        if stuck := _still_there(left, 60.0):
            said.extend(
                (
                    f"{content['directory']}: {what}, process {pid}, cannot be killed; run this "
                    "again later"
                )
                for what, pid, _ in stuck
            )
            continue
        said.append(f"{content['directory']}: cleaned")
        _discard(path, content)
    for path in folder().glob("*.new"):
        if start_time(int(path.name.partition("-")[0])) is None:
            path.unlink(missing_ok=True)  # its lab was killed while it wrote
    return said


def _still_there(
    processes: list[tuple[str, int, int]], seconds: float
) -> list[tuple[str, int, int]]:
    end = time.monotonic() + seconds
    while (
        left := [entry for entry in processes if start_time(entry[1]) == entry[2]]
    ) and time.monotonic() < end:
        time.sleep(0.02)
    return left


def temporary_directory() -> Path:
    """Return a new directory for a lab that was given none."""
    return Path(tempfile.mkdtemp(prefix=_PREFIX))


def _discard(path: Path, content: dict[str, Any]) -> None:
    directory = Path(content["directory"])
    if content["temporary"] and directory.name.startswith(_PREFIX):
        shutil.rmtree(directory, ignore_errors=True)
    path.with_suffix(".new").unlink(missing_ok=True)
    path.unlink(missing_ok=True)
