"""Explaining logs in tests, given as lines or as paths."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from dshealthd.explain import command
from dshealthd.explain.finding import Finding
from dshealthd.explain.input import Raw
from dshealthd.explain.recognition import Recognizer


def explained(*lines: str) -> Finding:
    """Explain one log of some lines."""
    return explained_files({"job.out": lines})


def explained_files(files: Mapping[str, Iterable[str]]) -> Finding:
    """Explain the lines of files by their names; all of them are looked at."""
    recognizer = Recognizer()
    for name, lines in files.items():
        recognizer.add(name, [Raw(number, line) for number, line in enumerate(lines, 1)])
    return command.conclude(recognizer)


def explained_paths(*paths: Path) -> Finding:
    """Explain files and folders, all of which can be read."""
    recognizer, unread = command.read([*map(str, paths)])
    assert unread == []
    return command.conclude(recognizer)


def explained_text(folder: Path, text: str) -> Finding:
    """Explain a text as the log `job.out` in a folder."""
    (folder / "job.out").write_text(text)
    return explained_paths(folder / "job.out")


def peak_memory(path: Path) -> int:
    """Return the most bytes of memory that the command takes for a log, in a process of its own."""
    code = (
        "import re, sys; from dshealthd.explain import command\n"
        "command.main(sys.argv[1:])\n"
        "print(*re.findall(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, check=True, text=True
    )
    return int(done.stdout.split()[-1]) << 10
