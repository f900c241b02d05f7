"""PyTorch's flight recorder of one rank: requests a dump through its FIFO, and takes it.

The job goes on. `TORCH_NCCL_DEBUG_INFO_PIPE_FILE=<prefix>` makes torch open `<prefix><rank>.pipe`
if `TORCH_NCCL_TRACE_BUFFER_SIZE` is set (by this very name, at least before 2.13). A thread polls
the FIFO once a second (`DumpPipe` in `torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp`). The dump
is written to `<TORCH_FR_DUMP_TEMP_FILE><rank>` (`DebugInfoWriter` in `FlightRecorder.cpp`).
"""

from __future__ import annotations

import errno
import functools
import os
import stat
import time
from collections.abc import Callable, Collection, Mapping

from dshealthd.core.host import Host, Signature, read_bytes, signature
from dshealthd.evidence.findings import file_of
from dshealthd.explain.dumps import MAX_DUMP
from dshealthd.linux import privileges
from dshealthd.linux.forked import Emit, Missing
from dshealthd.linux.process import open_files, parse_stat
from dshealthd.linux.process_root import Root
from dshealthd.linux.regular_files import Irregular, read

PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Variables with the path prefix of dumps; the first one that is set counts."""
QUIET = 0.5
"""Seconds without a change after which a dump counts as whole; torch writes it in one go."""
PATIENCE = 30.0
"""Seconds to wait for a dump. Torch polls the FIFO once a second. Before its first dump it imports
what resolves stacks: 2 s of CPU in 2.12.0, which took 13 to 16 s on a busy machine.
"""
_LOOK_EVERY = 0.1
_PIECE = 1 << 18


def collect(
    emit: Emit, host: Host, pid: int, rank: int, environment: Mapping[str, str]
) -> dict[str, object]:
    """Request a dump from a rank's recorder and emit `rank-<rank>-<pid>.flight-recorder.pickle`.

    `Missing` says why there is none, OSError.

    Becomes the rank's user. If the rank does not answer, an existing dump (from a timeout) is taken
    and marked as stale.
    """
    prefix = environment.get(PIPE)
    dumps = next((environment[name] for name in DUMPS if environment.get(name)), None)
    if dumps is None:
        message = f"its environment sets neither {PIPE} nor {DUMPS[0]}"
        if prefix:
            message = f"its environment does not say where dumps go: {DUMPS[0]} is not set"
        raise Missing(message)
    root = Root.of_process(host, pid)
    held = {os.path.basename(target) for target in open_files(host, pid)} if prefix else set()
    privileges.become(root.owner)
    privileges.end_with_parent()
    place = f"{dumps}{rank}"
    before = _signature(root.stat(place, follow=False))
    asked = (
        _request_dump(root, f"{prefix}{rank}.pipe", held)
        if prefix
        else f"{PIPE} is not set, so no dump could be requested"
    )
    fresh = not asked and _wait(root, place, before, functools.partial(_stopped, host, pid))
    if not fresh and before is None:
        late = f"no dump appeared within {PATIENCE:g} s: the thread that writes it may be hung too"
        if _stopped(host, pid):
            late = "the process is stopped by a signal and cannot dump"
        raise Missing(asked or late)
    try:
        descriptor = root.open_kind(
            place, os.O_RDONLY, stat.S_ISREG, "regular file", follow=False, owned=True
        )
    except Irregular as refusal:
        raise Missing(str(refusal)) from refusal
    name = f"{file_of(rank, pid)}.flight-recorder.pickle"
    try:
        written = os.fstat(descriptor)
        if written.st_size > MAX_DUMP:
            raise Missing(f"its dump is longer than {MAX_DUMP >> 20} MiB")
        # In pieces: many ranks dump at once, and a dump without content costs its user nothing.
        for start in range(0, max(written.st_size, 1), _PIECE):
            emit(name, read(descriptor, min(_PIECE, written.st_size - start)))
    finally:
        os.close(descriptor)
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(written.st_mtime))
    note = "" if fresh else f"from {when}, stale: {asked or 'no new dump'}"
    return {"file": name, "note": note, "written": written.st_mtime}


def _request_dump(root: Root, place: str, held: Collection[str]) -> str:
    """Write to a flight recorder's FIFO; return why that failed, or an empty string.

    `held` are the names of the files that the rank has open. A later job with the same prefix has
    removed the FIFO of an earlier one, and made its own.
    """
    try:
        descriptor = root.open_kind(
            place, os.O_WRONLY, stat.S_ISFIFO, "FIFO", follow=False, owned=True
        )
        try:
            if os.path.basename(place) not in held:
                return f"another process than the rank reads {place}"
            os.write(descriptor, b"1")
        finally:
            os.close(descriptor)
    except Irregular as refusal:
        return str(refusal)
    except BlockingIOError:
        return f"{place} is full: the rank does not read it"
    except OSError as error:
        return (
            f"no process reads {place}"
            if error.errno == errno.ENXIO
            else f"{place}: {error.strerror}"
        )
    return ""


def _stopped(host: Host, pid: int) -> bool:
    """Return whether a rank is stopped by a signal, so that its flight recorder cannot dump.

    A tracing stop does not count: py-spy, which runs at the same time, causes short ones.
    """
    try:
        return parse_stat(read_bytes(host.proc(f"{pid}/stat"))).state == "T"
    except (OSError, ValueError, ArithmeticError):
        return False  # it has ended or cannot be read: its dump may still appear


def _wait(root: Root, place: str, before: object, stopped: Callable[[], bool]) -> bool:
    """Wait for a new dump that is not empty and has not changed for a moment; return whether one
    appeared. Stop waiting if the process is stopped.
    """
    end = time.monotonic() + PATIENCE
    last, since = before, time.monotonic()
    while (now := time.monotonic()) < end:
        current = _signature(root.stat(place, follow=False))
        if current != last:
            last, since = current, now
        elif current is not None and current != before and now - since >= QUIET:
            return True
        if stopped():
            break
        time.sleep(_LOOK_EVERY)
    return last is not None and last != before


def _signature(found: os.stat_result | None) -> Signature | None:
    """Return what changes when a recorder dumps again; None while the dump is empty or missing."""
    return None if found is None or not found.st_size else signature(found)
