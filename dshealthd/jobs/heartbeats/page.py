"""The page of memory with a process's heartbeats: handed over on its connection, or found among
its descriptors.
"""

from __future__ import annotations

import array
import enum
import errno
import fcntl
import os
import socket
import struct
from typing import TYPE_CHECKING

from dshealthd.linux.mounts import mount_id
from dshealthd.training.message import HELLO, PAGE

if TYPE_CHECKING:
    from collections.abc import Callable

    from dshealthd.core.host import Host

CREDENTIALS = struct.Struct("=iII")
"""struct ucred: pid, user, group."""
_ANCILLARY = socket.CMSG_SPACE(CREDENTIALS.size) + socket.CMSG_SPACE(array.array("i").itemsize)
"""Space for the credentials and one descriptor, or two if they fit into the padding.

The kernel closes any further descriptors.
"""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_LINK = "/memfd:dshealthd-heartbeat (deleted)"
MAX_DESCRIPTORS = 65_536
"""Most descriptors of a process that are checked."""


class RejectReason(enum.StrEnum):
    """Why a connection was refused, or ended by the agent."""

    MALFORMED = "malformed"
    """It sent no page, a page that cannot be read or holds no heartbeat, or more than a page."""
    FORGED = "forged"
    """The page was handed over by another process than the one that connected, or by one outside
    this agent's pid namespace.
    """
    SENDERS = "senders"
    """It exceeded the limit in total or of its user, or made room for another connection."""
    SILENT = "silent"
    """It sent no page in time."""


def take_page(
    connection: socket.socket, pid: int, user: int, close: Callable[[int], object] = os.close
) -> int | RejectReason:
    """Return the descriptor of the page that a sender hands over, or why there is none.

    OSError if the connection has ended.

    Received descriptors that are not kept are passed to `close`, because closing another process's
    file may block: a TCP socket that lingers does, for as long as its owner wishes. The returned
    page is memory of the size of a page, and stays so. Reading or closing it does not block, and
    does not fail whatever another process does with it.
    """
    # One byte more than the greeting, so that a longer message does not match.
    data, ancillary, _, _ = connection.recvmsg(len(HELLO) + 1, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
    if not (data or ancillary):
        raise ConnectionResetError(errno.ECONNRESET, "closed before sending anything")
    files = array.array("i")
    same = False
    for level, kind, value in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            files.frombytes(value[: len(value) - len(value) % files.itemsize])
        elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            same = CREDENTIALS.unpack(value)[:2] == (pid, user)
    rejected = None
    if not same:
        rejected = RejectReason.FORGED
    elif data != HELLO or len(files) != 1 or not is_page(files[0]):
        rejected = RejectReason.MALFORMED
    if rejected is None:
        return files[0]
    # Received descriptors are ours now, even those of a rejected message.
    for file in files:
        close(file)
    return rejected


def is_page(file: int) -> bool:
    """Return whether a descriptor is memory of the size of a page that cannot shrink."""
    try:
        # The seals first, as only memory has them: on another file, the calls below might hang.
        sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        return sealed and os.fstat(file).st_size == PAGE and len(os.pread(file, PAGE, 0)) == PAGE
    except OSError:
        return False


def find_page(host: Host, pid: int) -> int | None:
    """Return a descriptor of a process's heartbeat page, None if it has none; OSError.

    A descriptor's target is opened only after it is known to be memory: a file can imitate the
    kernel's name, and opening it may block.
    """
    directory = host.proc(f"{pid}/fd")
    for number in os.listdir(directory)[:MAX_DESCRIPTORS]:
        try:
            if os.readlink(f"{directory}/{number}") != _LINK:
                continue
            held = os.open(f"{directory}/{number}", os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:  # closed meanwhile
            continue
        try:
            page = _opened(held)
        finally:
            os.close(held)
        if page is not None:
            return page
    return None


def _opened(held: int) -> int | None:
    """Open the target of an O_PATH descriptor, if it is a heartbeat page."""
    # Not by fstatfs, which queries the target's own file system: one that hangs would not answer.
    mount = mount_id(held)
    if mount < 0 or mount != _memory():
        return None
    page = os.open(f"/proc/self/fd/{held}", os.O_RDONLY | os.O_CLOEXEC)
    if is_page(page):
        return page
    os.close(page)
    return None


def _memory() -> int:
    """Return the mount id of the kernel's memory files, such as heartbeat pages."""
    file = os.memfd_create("dshealthd-mount", os.MFD_CLOEXEC)
    try:
        return mount_id(file)
    finally:
        os.close(file)
