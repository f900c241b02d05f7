"""A FUSE mount of a user's that stops answering: whoever asks it for anything sleeps in the kernel,
and no signal ends that sleep until the process that serves the mount has ended. Only its file PAGE
can be opened and mapped, and hangs who reads it.

Run as a module it is that process: `python -m tests.fuse DIRECTORY USER`; with `namespace` after
that in a user namespace of its own, whose root it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_REQUEST = struct.Struct("=IIQQIIII")
"""fuse_in_header (`linux/fuse.h`): length, operation, request, node, uid, gid, pid, padding."""
_ANSWER = struct.Struct("=IiQ")
_INIT_ANSWER = struct.Struct("=IIIIHHI40x")
_INIT, _LOOKUP, _GETATTR, _OPEN = 26, 1, 3, 14
_VERSION = (7, 31)
PAGE = "libpython3.11.so.1.0"
_NODE = 2
_ATTRIBUTES = struct.Struct("=6Q10I")
_VALID = 3600
_NEW_USERS, _NEW_MOUNTS = 0x1000_0000, 0x2_0000
"""CLONE_NEWUSER and CLONE_NEWNS of `linux/sched.h`."""
_libc = ctypes.CDLL(None, use_errno=True)


def _page() -> bytes:
    return _ATTRIBUTES.pack(_NODE, 4096, 8, 0, 0, 0, 0, 0, 0, 0o100644, 1, 0, 0, 0, 4096, 0)


def _answer(operation: int, node: int, asked: bytes) -> bytes | None:
    """Return what the server answers to a request of the kernel; None if it hangs."""
    if operation == _INIT:
        return _INIT_ANSWER.pack(*_VERSION, 0, 0, 0, 0, 1 << 16)
    if operation == _LOOKUP and asked == PAGE.encode() + b"\0":
        return struct.pack("=QQQQII", _NODE, 0, _VALID, _VALID, 0, 0) + _page()
    if operation == _GETATTR and node == _NODE:
        return struct.pack("=QII", _VALID, 0, 0) + _page()
    if operation == _OPEN and node == _NODE:
        return struct.pack("=QII", 1, 0, 0)
    return None


@contextlib.contextmanager
def hung_mount(directory: Path, user: int, *how: str) -> Iterator[int]:
    """Mount a file system that a user serves, with `allow_other`, and that never answers; give the
    pid of its server. Skips the test where that is not permitted. In the end whoever waits for it
    goes on, with an error.
    """
    directory.mkdir()
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.fuse", str(directory), str(user), *how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        if server.stdout.readline() != "mounted\n":
            import pytest

            _, errors = server.communicate(timeout=60)
            pytest.skip(f"FUSE is not permitted here: {errors.splitlines()[-1]}")
        yield server.pid
    finally:
        server.kill()  # its descriptor was the connection: all requests end
        server.communicate(timeout=60)
        subprocess.run(
            ["umount", "--lazy", str(directory)], check=False, timeout=60, capture_output=True
        )


def enter_namespace() -> None:
    """Become root of a user namespace, with mounts of its own."""
    if _libc.unshare(_NEW_USERS | _NEW_MOUNTS):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    for file, text in (("setgroups", "deny"), ("uid_map", "0 0 1"), ("gid_map", "0 0 1")):
        Path(f"/proc/self/{file}").write_text(text)


def main(directory: str, user: int, *how: str) -> None:
    """Mount, answer what the kernel needs for that, and then read requests without an answer."""
    if how:
        enter_namespace()
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id={user},group_id={user}"
    options += "" if how else ",allow_other"  # which does not reach out of a namespace
    if _libc.mount(b"hung", directory.encode(), b"fuse.hung", 6, options.encode()):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), directory)
    while True:
        request = os.read(device, 1 << 17)
        _, operation, number, node, *_ = _REQUEST.unpack_from(request)
        if (body := _answer(operation, node, request[_REQUEST.size :])) is not None:
            os.write(device, _ANSWER.pack(_ANSWER.size + len(body), 0, number) + body)
        if operation == _INIT:
            print("mounted", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
