"""The adoption of a heartbeat page that a process handed over to an agent before this one.

A rank hands its page to a new agent with its next message, which one that hangs never sends. So an
agent that is started anew takes the pages of the ranks that the one before it knew, from their
descriptors in `/proc`.
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
"""Descriptors of a process that are looked at."""


def find_page(host: Host, pid: int) -> int | None:
    """Return a descriptor of the heartbeat page of a process, None if it has none; OSError.

    What a descriptor of it leads to is opened only once it is known to be memory: the kernel's
    names can be imitated by files, to open which may block.
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
    """Open what is held by O_PATH, if it is a heartbeat page to adopt."""
    # Not by fstatfs, which asks the file's own system: one that hangs would not answer.
    if _mount(held) != _memory():
        return None
    page = os.open(f"/proc/self/fd/{held}", os.O_RDONLY | os.O_CLOEXEC)
    if is_page(page):
        return page
    os.close(page)
    return None


def _memory() -> str:
    """Return the mount that the kernel keeps all memory files, such as heartbeat pages, on."""
    file = os.memfd_create("dshealthd-mount", os.MFD_CLOEXEC)
    try:
        return _mount(file)
    finally:
        os.close(file)


def _mount(descriptor: int) -> str:
    """Return the mount of a descriptor to adopt, without asking its file system; OSError."""
    found = _MOUNT.search(read(f"/proc/self/fdinfo/{descriptor}"))
    if found is None:
        message = "/proc/self/fdinfo tells no mount"
        raise OSError(message)
    return found[1]
