"""Environments of processes that were just started."""

from __future__ import annotations

import time
from pathlib import Path


def wait_for_environment(pid: int, seconds: float = 60.0) -> None:
    """Wait until the environment of a process can be read.

    A parent goes on while the kernel still works on its child's exec; until that is done the
    child's environment is empty, and who looks at it then sees no rank.
    """
    end = time.monotonic() + seconds
    while not Path(f"/proc/{pid}/environ").read_bytes():
        assert time.monotonic() < end, f"process {pid} has no environment"
        time.sleep(0.002)
