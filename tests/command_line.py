"""The command line as a process of its own, and scripts that stand in for other programs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def dshealthd(*arguments: str, seconds: float = 180.0) -> subprocess.CompletedProcess[str]:
    """Run `dshealthd`, and return how it ended and what it printed."""
    return subprocess.run(
        [sys.executable, "-m", "dshealthd", *arguments],
        capture_output=True, text=True, timeout=seconds, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def shell_script(path: Path, text: str) -> Path:
    """Write a program that is run in place of another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path
