"""Process 1 of one of the lab's machines.

Makes its namespaces, holds them, and takes everything in them along when it ends.

It is started as the first process of a new pid namespace and ends when its standard input does, so
the end of the lab, however it comes, is the end of the machine: the kernel kills what runs in the
pid namespace and removes the network with its interfaces, rules and mounts. It is a plain file for
an interpreter without site packages, which starts in a few milliseconds.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import sys
from typing import Any

_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x40000000
"""CLONE_NEWNS, NEWUTS, NEWIPC and NEWNET."""
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_CGROUPS = "/sys/fs/cgroup"

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    result = _libc.mount(
        source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), None
    )
    _check(result, f"mount {target}")


def _become(plan: dict[str, Any]) -> None:
    """Make the namespaces; a /proc, /sys and /dev/shm that show them; the host name.

    And the files that are to be seen in /etc.
    """
    _check(_libc.unshare(_NAMESPACES), "unshare")
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    cgroups = os.open(_CGROUPS, os.O_PATH) if os.path.isdir(_CGROUPS) else None
    _mount("sysfs", "/sys", "sysfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    if cgroups is not None:
        _mount(f"/proc/self/fd/{cgroups}", _CGROUPS, None, _MS_BIND | _MS_REC)
        os.close(cgroups)
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    _mount("tmpfs", "/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV)
    for target, source in plan["files"].items():
        if os.path.exists(target):
            _mount(source, target, None, _MS_BIND)
    socket.sethostname(plan["hostname"])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def main() -> None:
    """Become the machine, say `ready` or why not, and stay until standard input ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans that end are reaped by the kernel
    try:
        _become(json.loads(sys.argv[1]))
    except OSError as error:
        print(error.args[1], flush=True)
        raise SystemExit(1) from error
    print("ready", flush=True)
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
