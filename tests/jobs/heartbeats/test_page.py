"""Pages are found among the descriptors of a process, and nothing that only looks like one."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dshealthd.core.host import Host
from dshealthd.jobs.heartbeats import page as page_module
from dshealthd.jobs.heartbeats.page import find_page
from dshealthd.training.message import PAGE, Message, encode, newest_message
from dshealthd.training.page import Page


@pytest.fixture
def page() -> Iterator[Page]:
    """Return a page that this process has made."""
    made = Page()
    made.open()
    yield made
    made.close()


def step() -> int | None:
    """Return the step of the page that is found in this process; None if there is none."""
    if (found := find_page(Host(), os.getpid())) is None:
        return None
    file, number = found
    try:
        assert fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        assert os.path.sameopenfile(file, number)
        return newest_message(os.pread(file, PAGE, 0)).step
    finally:
        os.close(file)


def test_the_page_of_a_process() -> None:
    """The page is found, read only, and what it holds is what the process writes."""
    page = Page()
    assert step() is None
    page.open()
    page.write(encode(Message(7, 1.0)))
    assert step() == 7
    page.close()
    assert step() is None


def test_the_latest_of_two_pages(page: Page) -> None:
    """A training that is attached to anew, and has not closed its first heartbeat, has two pages:
    the one that it writes counts, whichever was made first.
    """
    page.write(encode(Message(7, 1.0)))
    other = Page()
    other.open()
    assert step() == 7
    other.write(encode(Message(1, 2.0)))
    assert step() == 1
    page.write(encode(Message(8, 3.0)))
    assert step() == 8
    other.close()


def test_a_descriptor_that_cannot_be_read(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file whose path is too long for the kernel to tell hides no page; and whatever fails, no
    descriptor of a page is left open, of which a user could use up all.
    """
    page.write(encode(Message(7, 1.0)))
    with monkeypatch.context() as patched, contextlib.ExitStack() as held:
        patched.chdir(tmp_path)
        for _ in range(20):
            os.mkdir("d" * 255)
            os.chdir("d" * 255)
        held.callback(os.close, os.open("file", os.O_CREAT))
        assert step() == 7
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(page_module, "has_page", refuse_after(page_module.has_page))
    with pytest.raises(PermissionError):
        find_page(Host(), os.getpid())
    assert os.listdir("/proc/self/fd") == before


def refuse_after(has_page: Callable[..., bool]) -> Callable[..., bool]:
    """Return the function, but for the descriptors after a page: they cannot be read."""
    found = False

    def refusing(*of: Any) -> bool:
        nonlocal found
        if found:
            raise PermissionError
        found = has_page(*of)
        return found

    return refusing


def test_what_only_looks_like_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that can shrink, memory of another size, and a file of that name are left alone."""
    name = "memfd:dshealthd-heartbeat (deleted)"
    fifo = tmp_path / name
    os.mkfifo(fifo)  # to open it for reading would block
    with contextlib.ExitStack() as held:
        for size in (PAGE, 2 * PAGE):
            file = os.memfd_create("dshealthd-heartbeat", os.MFD_ALLOW_SEALING)
            held.callback(os.close, file)
            os.ftruncate(file, size)
            if size != PAGE:
                fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        assert find_page(Host(), os.getpid()) is None
        held.callback(os.close, os.open(fifo, os.O_RDWR))
        monkeypatch.setattr(page_module, "_LINK", str(fifo))
        assert find_page(Host(), os.getpid()) is None
