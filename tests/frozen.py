"""A file system that freezes: writing to it puts a process into a sleep that no signal ends, until
it is thawed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

THAW_SECONDS = 240
"""Longer than any test needs it frozen, also on a slow machine, and shorter than a test may
take."""


class Mount:
    """An ext4 on a loop device."""

    def __init__(self, directory: Path) -> None:
        """`directory` is where it is mounted."""
        self.directory = directory

    def freeze(self) -> None:
        """Make every write hang, in the kernel."""
        run("fsfreeze", "--freeze", str(self.directory))

    def thaw(self) -> None:
        """Let the writes go on; no error if it was not frozen."""
        subprocess.run(
            ["fsfreeze", "--unfreeze", str(self.directory)],
            check=False,
            capture_output=True,
            timeout=60,
        )


def run(*command: str) -> None:
    """Run a command; its output is in the error it may raise."""
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def wait_until_it_hangs(pid: int) -> None:
    """Wait until a process has slept uninterruptibly for a second and has not run in between. A
    process that starts sleeps so too, for as long as the disk takes to read its code.
    """
    end, seen, since = time.monotonic() + 60, "", 0.0
    while time.monotonic() < end:
        status = Path(f"/proc/{pid}/status").read_text()
        if "State:\tD" not in status or status != seen:
            seen, since = status, time.monotonic()
        elif time.monotonic() - since >= 1:
            return
        time.sleep(0.05)
    raise TimeoutError(seen)


@contextlib.contextmanager
def mounted(base: Path, thaw: float = THAW_SECONDS) -> Iterator[Mount]:
    """Mount a small ext4 below `base`, or skip where mounting is not permitted. A child of its own
    thaws it after `thaw` seconds even if this process dies.
    """
    image, directory = base / "image", base / "mount"
    directory.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    run("mkfs.ext4", "-q", str(image))
    try:
        run("mount", "-o", "loop", str(image), str(directory))
    except subprocess.CalledProcessError as error:
        import pytest  # not needed by the demonstration, which has none

        pytest.skip(f"mounting is not permitted here: {error.stderr.decode().strip()}")
    mount = Mount(directory)
    guard = subprocess.Popen(
        ["sh", "-c", f"sleep {thaw}; fsfreeze --unfreeze '{directory}'"],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield mount
    finally:
        mount.thaw()
        os.killpg(guard.pid, 9)
        guard.wait()
        subprocess.run(["umount", "--lazy", str(directory)], check=False, timeout=60)
