"""Python stacks of one rank, by py-spy, without stopping it and without values of variables."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from dshealthd.core import documents
from dshealthd.core.host import Host, lines_of, read
from dshealthd.core.text import printable
from dshealthd.evidence.findings import file_of
from dshealthd.explain.flight_recorder import is_library
from dshealthd.linux import privileges
from dshealthd.linux.forked import Emit, Missing
from dshealthd.linux.process_root import Root

ATTEMPTS = 3
"""A running process may be read in the middle of a change, so several attempts are made."""
MAX_OUTPUT = 8 << 20
_MAPS = 16 << 20
"""Bytes of the list of mappings, which has one or two MiB in a training."""
_MAIN = "MainThread"
"""Name that `threading` gives the main thread. In py-spy's output it is the last: the interpreter
lists its threads newest first.
"""


def find_py_spy() -> str | None:
    """Return the path of py-spy: beside the agent's own interpreter, or in PATH."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


def collect(emit: Emit, host: Host, pid: int, rank: int, program: str | None) -> dict[str, Any]:
    """Emit `rank-<rank>-<pid>.stacks.txt` and return where the main thread is.

    `Missing` says why there are none, OSError.

    Becomes the rank's user, but keeps the right to read its memory, which Yama denies users. Where
    py-spy would ask a user's FUSE mount, whose answer nothing can interrupt, it is not run.
    """
    if program is None:
        raise Missing("py-spy is not installed")
    with Root.of_process(host, pid) as root:
        user = root.owner
        for path in _python_files(host, pid):
            root.refuse_served(path)
    # Opened now: the rank's user may have no access to its directory.
    descriptor = os.open(program, os.O_RDONLY | os.O_CLOEXEC)
    privileges.become(user, keep_ptrace=True)
    privileges.end_with_parent()
    for _ in range(ATTEMPTS):
        output, problem = _run(descriptor, pid)
        try:
            threads = parse(output) if not problem else []
        except (ValueError, ArithmeticError) as error:
            problem = f"py-spy output not understood: {error}"
        if not problem:
            break
    if problem:
        raise Missing(problem)
    emit(f"{file_of(rank, pid)}.stacks.txt", write(threads).encode(errors="replace"))
    # Not by its id: py-spy knows none before Python 3.11, and of a container that of its namespace.
    main = next((thread for thread in threads if thread["name"] == _MAIN), threads[-1])
    at, inside = place(main["frames"]), place(main["frames"][:1])
    return {"at": at, "in": "" if inside == at else inside}


def _python_files(host: Host, pid: int) -> set[str]:
    """Return the paths that py-spy opens of a process: its program, and Python's library."""
    lines = (line.split(None, 5) for line in lines_of(read(host.proc(f"{pid}/maps"), _MAPS)))
    mapped = {fields[5] for fields in lines if "python" in fields[-1].rpartition("/")[2]}
    return {os.readlink(host.proc(f"{pid}/exe")), *mapped}


def _run(program: int, pid: int) -> tuple[bytes, str]:
    with subprocess.Popen(  # noqa: S603 - a program of the administrator's
        # the open file is what runs
        ["py-spy", "dump", "--nonblocking", "--json", "--pid", str(pid)],  # noqa: S607
        executable=f"/proc/self/fd/{program}",
        pass_fds=[program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin", "HOME": "/", "RUST_BACKTRACE": "0", "NO_COLOR": "1"},
        cwd="/",
    ) as process:
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        assert process.stderr is not None  # noqa: S101 - it is a pipe
        output = process.stdout.read(MAX_OUTPUT + 1)
        if len(output) > MAX_OUTPUT:
            process.kill()
            return b"", f"py-spy printed more than {MAX_OUTPUT >> 20} MiB"
        words = process.stderr.read(MAX_OUTPUT).decode(errors="replace")
    if process.returncode == 0:
        return output, ""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return output, f"py-spy: {lines[0][:300] if lines else f'status {process.returncode}'}"


def parse(output: bytes) -> list[dict[str, Any]]:
    """Return the threads of `py-spy dump --json`, without command line and variables.

    ValueError if malformed.
    """
    try:
        document = json.loads(output)
        threads = [
            {
                "os": thread.get("os_thread_id"),
                "name": str(thread.get("thread_name") or ""),
                "active": bool(thread.get("active")),
                "gil": bool(thread.get("owns_gil")),
                "frames": [
                    (str(frame["name"]), str(frame["filename"]), int(frame.get("line") or 0))
                    for frame in thread["frames"]
                ],
            }
            for thread in document
        ]
    except documents.MISSHAPEN as error:
        raise ValueError(repr(error)[:200]) from error
    if not threads:
        raise ValueError("no threads")
    return threads


def write(threads: list[dict[str, Any]]) -> str:
    """Return the stacks as text, innermost frame first."""
    parts = []
    for thread in threads:
        marks = ("active" if thread["active"] else "idle") + ", holds the GIL" * thread["gil"]
        parts.append(f"thread {thread['os']} {thread['name']!r} ({marks})\n")
        parts += [
            f"    {printable(name)} ({printable(filename)}:{line})\n"
            for name, filename, line in thread["frames"]
        ]
        parts.append("\n")
    return "".join(parts)


def place(frames: list[tuple[str, str, int]]) -> str:
    """Return the innermost frame outside libraries, or the innermost of all if there is none."""
    own = [frame for frame in frames if not is_library(frame[1])]
    name, filename, line = (own or frames or [("?", "?", 0)])[0]
    return printable(f"{filename}:{line} {name}")
