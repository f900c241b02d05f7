"""What a descriptor of a process (pidfd_open(2)) tells of its end, from PIDFD_GET_INFO."""

from __future__ import annotations

import fcntl
import struct

_GET_INFO = 0xC040FF0B
"""PIDFD_GET_INFO of linux/pidfd.h: `_IOWR(0xFF, 11, struct pidfd_info)`, of its first 64 bytes."""
_EXIT = 1 << 3
"""PIDFD_INFO_EXIT."""
_INFO = struct.Struct("=Q52xi")
"""The mask, what is not asked for, and `exit_code`."""


def exit_status(descriptor: int) -> int | None:
    """Return the status of a process whose parent has reaped it, as waitpid(2) has it.

    None while it was not reaped, and before Linux 6.15, which does not tell.
    """
    info = bytearray(_INFO.pack(_EXIT, 0))
    try:
        fcntl.ioctl(descriptor, _GET_INFO, info)
    except OSError:  # ENOTTY, EINVAL: an earlier kernel
        return None
    mask, status = _INFO.unpack(info)
    return int(status) if mask & _EXIT else None
