"""The adoption of a heartbeat page that a process handed to an earlier agent.

A rank hands its page to a new agent with its next message, which a hung rank never sends. So a
restarted agent takes the pages of the ranks that its predecessor knew, from their descriptors in
`/proc`.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from dshealthd.core.host import read
from dshealthd.jobs.heartbeats.sender import is_page

if TYPE_CHECKING:
    from dshealthd.core.host import Host

_LINK = "/memfd:dshealthd-heartbeat (deleted)"
_MOUNT = re.compile(r"^mnt_id:\s*(\d+)$", re.MULTILINE)
MAX_DESCRIPTORS = 65_536
"""Most descriptors of a process that are checked."""


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
    if _mount(held) != _memory():
        return None
    page = os.open(f"/proc/self/fd/{held}", os.O_RDONLY | os.O_CLOEXEC)
    if is_page(page):
        return page
    os.close(page)
    return None


def _memory() -> str:
    """Return the mount id of the kernel's memory files, such as heartbeat pages."""
    file = os.memfd_create("dshealthd-mount", os.MFD_CLOEXEC)
    try:
        return _mount(file)
    finally:
        os.close(file)


def _mount(descriptor: int) -> str:
    """Return the mount id of a descriptor without querying its file system; OSError."""
    found = _MOUNT.search(read(f"/proc/self/fdinfo/{descriptor}"))
    if found is None:
        message = "/proc/self/fdinfo has no mnt_id"
        raise OSError(message)
    return found[1]
