"""Exit status of a process through its descriptor (pidfd_open(2)), from PIDFD_GET_INFO."""

from __future__ import annotations

import fcntl
import struct

_GET_INFO = 0xC040FF0B
"""PIDFD_GET_INFO of linux/pidfd.h: `_IOWR(0xFF, 11, struct pidfd_info)`, of its first 64 bytes."""
_EXIT = 1 << 3
"""PIDFD_INFO_EXIT."""
_INFO = struct.Struct("=Q52xi")
"""The mask, unused fields, and `exit_code`."""


def exit_status(descriptor: int) -> int | None:
    """Return the status, as of waitpid(2), of a process that its parent has reaped.

    None while it is not reaped, and before Linux 6.15, which does not support this.
    """
    info = bytearray(_INFO.pack(_EXIT, 0))
    try:
        fcntl.ioctl(descriptor, _GET_INFO, info)
    except OSError:  # ENOTTY, EINVAL: an earlier kernel
        return None
    mask, status = _INFO.unpack(info)
    return int(status) if mask & _EXIT else None
