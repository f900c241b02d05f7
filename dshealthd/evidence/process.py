"""The kernel's view: what each thread of a rank waits for, and whether the process moves."""

from __future__ import annotations

import os
import time
from typing import Any

from dshealthd.core.host import Host, lines_of, read
from dshealthd.core.text import printable
from dshealthd.evidence.findings import file_of
from dshealthd.linux.activity import parse_activity
from dshealthd.linux.forked import Emit, Missing

INTERVAL = 1.0
"""Seconds between the two readings."""
MAX_THREADS = 128
_STATUS = (
    *("Name", "State", "Uid", "Threads", "VmHWM", "VmRSS", "VmSwap", "SigPnd", "ShdPnd"),
    *("Cpus_allowed_list", "Mems_allowed_list"),
)
_IO = ("rchar", "wchar", "read_bytes", "write_bytes")


def collect(emit: Emit, host: Host, pid: int, rank: int) -> dict[str, Any]:
    """Emit the kernel's view, `rank-<rank>-<pid>.kernel.txt`; `Missing` if the process is gone.

    Return the state, where the main thread waits, CPU use and I/O.
    """
    name = f"{file_of(rank, pid)}.kernel.txt"
    before, transferred = _cpu(host, pid), _transferred(host, pid)
    if before is None:
        raise Missing(f"process {pid} is gone")
    started = time.monotonic()
    for line in lines_of(_read(host, f"{pid}/status")):
        if line.partition(":")[0] in _STATUS:
            emit(name, f"{printable(line)}\n".encode(errors="replace"))
    waits = ""
    for number, thread in enumerate(_threads(host, pid)):
        text, place = _thread(host, f"{pid}/task/{thread}")
        emit(name, text.encode(errors="replace"))
        waits = place if number == 0 else waits
    time.sleep(max(0.0, INTERVAL - (time.monotonic() - started)))
    after = _cpu(host, pid)
    moved = _moved(transferred, _transferred(host, pid))
    if after is None:
        return {"state": "gone", "waits": waits, "cpu": None, "io": moved}
    state, cpu = after
    share = (cpu - before[1]) / (time.monotonic() - started)
    emit(
        name,
        (
            f"\nCPU time since the first look: {share:.2f} of a core; read and written: {moved}\n"
        ).encode(),
    )
    return {"state": state, "waits": waits, "cpu": round(share, 2), "io": moved}


def _threads(host: Host, pid: int) -> list[str]:
    """Return the thread ids of a process, the main thread first."""
    try:
        names = os.listdir(host.proc(f"{pid}/task"))
    except (FileNotFoundError, ProcessLookupError):
        return []
    return sorted(names, key=lambda name: (name != str(pid), int(name)))[:MAX_THREADS]


def _thread(host: Host, place: str) -> tuple[str, str]:
    """Return a thread's description, and where it waits in the kernel."""
    parts = {name: _read(host, f"{place}/{name}") for name in ("comm", "wchan", "syscall", "stack")}
    try:
        state = parse_activity(_read(host, f"{place}/stat").encode()).state.value
    except (ValueError, ArithmeticError):
        state = "unknown"
    waits = parts["wchan"] if parts["wchan"] not in {"", "0"} else ""
    text = (
        f"\nthread {place.rpartition('/')[2]} {parts['comm']!r}: {state}, "
        f"waits in {waits or '-'}, system call {parts['syscall'] or '-'}\n"
    )
    return text + "".join(f"    {printable(line)}\n" for line in lines_of(parts["stack"])), waits


def _read(host: Host, place: str) -> str:
    """Return the text of a file in /proc; in brackets why it cannot be read."""
    try:
        return read(host.proc(place)).strip()
    except OSError as error:
        return f"({error.strerror})"


def _cpu(host: Host, pid: int) -> tuple[str, float] | None:
    try:
        found = parse_activity(read(host.proc(f"{pid}/stat")).encode())
    except (FileNotFoundError, ProcessLookupError):
        return None
    return found.state.value, found.cpu_seconds


def _transferred(host: Host, pid: int) -> dict[str, int]:
    """Return the bytes that a process has read and written; empty if not permitted."""
    found = {}
    for line in lines_of(_read(host, f"{pid}/io")):
        name, _, value = line.partition(":")
        if name in _IO and value.strip().isdecimal():
            found[name] = int(value)
    return found


def _moved(before: dict[str, int], after: dict[str, int]) -> str:
    if not before or not after:
        return "unknown"
    moved = {
        name: after[name] - before[name] for name in _IO if after.get(name, 0) > before.get(name, 0)
    }
    return " ".join(f"{name} {value}" for name, value in moved.items()) or "nothing"
