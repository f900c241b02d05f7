"""The command line as a process of its own."""

from __future__ import annotations

import subprocess
import sys


def dshealthd(*arguments: str, seconds: float = 180.0) -> subprocess.CompletedProcess[str]:
    """Run `dshealthd`, and return how it ended and what it printed."""
    return subprocess.run(
        [sys.executable, "-m", "dshealthd", *arguments],
        capture_output=True, text=True, timeout=seconds, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
