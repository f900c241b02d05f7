"""A journald of its own, whose kernel log is one that tests write to: the genuine program, as root.

It runs in a mount namespace, where a FIFO lies over /dev/kmsg; nothing of this machine's is
touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.kernel_log import KernelLog
from tests.waiting import until

PROGRAM = Path("/lib/systemd/systemd-journald")
SECONDS = 60.0
START = """
mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/journal /run/log/journal &&
mount --bind "$1" /run/log/journal && mount --bind "$2" /dev/kmsg && exec "$3"
"""


class Journald:
    """A running journald; `root` is the root of a host that has its journal."""

    def __init__(self, root: Path, kernel: KernelLog, pid: int) -> None:
        """Take a journald that runs as `pid`."""
        self.root, self.kernel, self._pid = root, kernel, pid

    @property
    def files(self) -> Path:
        """Return the directory of its files."""
        (directory,) = (self.root / "run/log/journal").iterdir()
        return directory

    def control(self, *flags: str) -> str:
        """Run journalctl beside it and return what it says."""
        enter = ["nsenter", f"--mount=/proc/{self._pid}/ns/mnt", "journalctl", *flags]
        return subprocess.run(
            enter, check=True, capture_output=True, text=True, timeout=SECONDS
        ).stdout

    def say(self, *messages: str) -> None:
        """Have the kernel say something, and wait until it is in the journal."""
        for message in messages:
            self.kernel.say(message)
        self.await_(messages[-1])

    def await_(self, text: str) -> None:
        """Wait until a message is in the journal."""
        until(
            lambda: text in self.control("--dmesg", "--output=cat", "--quiet"),
            lambda: text,
            SECONDS,
        )


def reason_against() -> str:
    """Return why there can be none here; empty if there can."""
    if not PROGRAM.exists() or shutil.which("unshare") is None:
        return "systemd-journald is not installed"
    if os.geteuid() != 0 or not os.path.exists("/dev/kmsg"):
        return "journald needs root and a /dev/kmsg to lay its own over"
    return ""


@contextlib.contextmanager
def journald(directory: Path, environment: Mapping[str, str] | None = None) -> Iterator[Journald]:
    """Run one with files below `directory`, until it is left."""
    root = directory / "root"
    journal = root / "run/log/journal"
    journal.mkdir(parents=True)
    (root / "etc").mkdir()
    shutil.copy("/etc/machine-id", root / "etc/machine-id")
    kernel = KernelLog(directory / "kmsg")
    variables = {"PATH": os.environ["PATH"], "SYSTEMD_LOG_TARGET": "console"}
    with (
        contextlib.closing(kernel),
        subprocess.Popen(
            [
                *("unshare", "--mount", "--propagation", "private", "sh", "-c", START, "sh"),
                *(str(journal), str(directory / "kmsg"), str(PROGRAM)),
            ],
            env={**variables, **(environment or {})},
            stderr=subprocess.DEVNULL,
        ) as process,
    ):
        try:
            made = Journald(root, kernel, process.pid)
            until(
                lambda: any(journal.rglob("system.journal")),
                lambda: f"journald does not begin: {process.poll()}",
                SECONDS,
            )
            made.await_("Linux version 6.1.0")
            yield made
        finally:
            process.terminate()
            process.wait(SECONDS)
