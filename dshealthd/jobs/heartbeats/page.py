"""The page of memory with a process's heartbeats, found among its descriptors."""

from __future__ import annotations

import errno
import fcntl
import functools
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.linux.mounts import mount_id
from dshealthd.training.message import PAGE, newest_message

if TYPE_CHECKING:
    from dshealthd.core.host import Host

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_LINK = "/memfd:dshealthd-heartbeat (deleted)"
MAX_PAGES = 256
"""Most pages that the agent reads."""
MAX_DESCRIPTORS = 65_536
"""Most descriptors of a process that are checked."""


class PageHolder(NamedTuple):
    """A process that has a heartbeat page."""

    pid: int
    start: int
    user: int
    descriptor: int = -1
    """Its descriptor of the page; -1 if that has yet to be found."""
    inode: int = 0
    """Tells the page from another one of the process; 0 as long as its descriptor is unknown."""


def page_holder(labels: Mapping[str, str]) -> PageHolder:
    """Return the process of which `dshealthd_job_heartbeat_page_info` says that it has a page."""
    return PageHolder(*(int(labels[name]) for name in PageHolder._fields))


def find_page(host: Host, pid: int) -> tuple[int, int] | None:
    """Return a descriptor of a process's heartbeat page, and its number in the process; None if it
    has none; OSError.

    Of several pages, which follow each other if a training is attached to anew, this is the one
    with the latest heartbeat.
    """
    directory = host.proc(f"{pid}/fd")
    found: tuple[int, int] | None = None
    latest = -1.0
    try:
        for name in os.listdir(directory)[:MAX_DESCRIPTORS]:
            number = int(name)
            page = open_page(host, pid, number)
            if page is None:
                continue
            sent = _sent(page)
            if found is None or sent >= latest:
                if found is not None:
                    os.close(found[0])
                found, latest = (page, number), sent
            else:
                os.close(page)
    except OSError:
        if found is not None:
            os.close(found[0])
        raise
    return found


def open_page(host: Host, pid: int, number: int) -> int | None:
    """Return a descriptor of the heartbeat page behind a descriptor of a process, None if that is
    none; OSError.

    The target is opened only after it is known to be memory: a file can imitate the kernel's name,
    and opening it may block. Reading or closing the returned page does not block, and does not fail
    whatever another process does with it.
    """
    if not has_page(host, pid, number):
        return None
    try:
        held = os.open(host.proc(f"{pid}/fd/{number}"), os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:  # closed meanwhile
        return None
    try:
        # Not by fstatfs, which queries the target's own file system: one that hangs would not
        # answer.
        mount = mount_id(held)
        if mount < 0 or mount != _mount_of_kernel_memory():
            return None
        page = os.open(f"/proc/self/fd/{held}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(held)
    if is_page(page):
        return page
    os.close(page)
    return None


def has_page(host: Host, pid: int, number: int) -> bool:
    """Return whether a process's descriptor has the name of a heartbeat page; OSError if that
    cannot be read. Does not block.
    """
    try:
        return os.readlink(host.proc(f"{pid}/fd/{number}")) == _LINK
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # a path of more than 4 KiB
            return False
        raise


def is_page(file: int) -> bool:
    """Return whether a descriptor is memory of the size of a page that cannot shrink."""
    try:
        # The seals first, as only memory has them: on another file, the calls below might hang.
        sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        return sealed and os.fstat(file).st_size == PAGE and len(os.pread(file, PAGE, 0)) == PAGE
    except OSError:
        return False


def _sent(page: int) -> float:
    """Return the time of a page's last heartbeat; 0 if it has none."""
    try:
        return newest_message(os.pread(page, PAGE, 0)).sent
    except (OSError, ValueError, ArithmeticError):
        return 0.0


@functools.cache
def _mount_of_kernel_memory() -> int:
    """Return the mount id of the kernel's memory files, such as heartbeat pages."""
    file = os.memfd_create("dshealthd-mount", os.MFD_CLOEXEC)
    try:
        return mount_id(file)
    finally:
        os.close(file)
