"""The service as a process of its own, and what it does to the text of a rank."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dshealthd.linux.elf import functions
from tests.waiting import until


def run(folder: Path, procfs: Path, *before: str) -> tuple[subprocess.Popen[bytes], Path]:
    """Start the service as a process of its own. Return it, and the file it writes."""
    output = folder / "launches.json"
    command = [*before, sys.executable, "-m", "dshealthd", "launches"]
    flags = ["--output", str(output), "--path.procfs", str(procfs)]
    return subprocess.Popen([*command, *flags]), output


def wait(output: Path, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Return the first document for which a condition holds."""

    def right() -> dict[str, Any] | None:
        document: dict[str, Any] = json.loads(output.read_bytes())
        return document if condition(document) else None

    return until(right, errors=(FileNotFoundError,))


def text_of(pid: int, library: Path, names: set[str]) -> dict[str, tuple[bytes, bytes]]:
    """Return the first bytes of functions, in a process and in the file that it has mapped, by its
    path there.
    """
    found = {}
    seen = f"/proc/{pid}/root{library}"
    with open(seen, "rb") as file, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for name, function in functions(file.fileno(), names).items():
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                at, _, offset, _, _, *path = line.split(None, 5)
                start, end = (int(each, 16) for each in at.split("-"))
                within = function.offset - int(offset, 16)
                if path == [str(library)] and 0 <= within < end - start:
                    memory.seek(start + within)
                    found[name] = memory.read(8), function.code
    assert found.keys() == names
    return found


def wait_for_original_text(pid: int, library: Path, names: set[str]) -> None:
    """Wait until functions are in a process as they are in the file: the kernel may take a while to
    remove breakpoints after their holder has ended.
    """
    until(lambda: all(memory == file for memory, file in text_of(pid, library, names).values()))
