"""The page on which a worker says how far it is, and what it prints."""

from __future__ import annotations

import contextlib
import os

import pytest

from dshealthd.probe.workers.fork_server import StatusPage


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (b"", ""),
        (b"one\n\x1b[2Jtwo\xff\n", "one  [2Jtwo\ufffd"),
        (b"a" + b"b" * 599, "a" + "b" * 599),
        (b"a" + b"b" * 600, "b" * 600),
        (b"a" * 65_000 + b"the end", "a" * 593 + "the end"),
        (b"a" * 66_000 + b"the end", "a" * 600),
    ],
)
def test_end_of_what_is_printed(printed: bytes, shown: str) -> None:
    """The last 600 bytes on one line, of 64 KiB: a library that prints in a loop fills no more.
    The counters before it stay as they are.
    """
    page = StatusPage()
    os.pwrite(page.descriptor, (7).to_bytes(8, "little") + (5).to_bytes(8, "little"), 0)
    with contextlib.suppress(PermissionError):  # beyond the page
        while printed:
            printed = printed[os.write(page.descriptor, printed) :]
    assert page.printed() == shown
    assert page.counters() == (7, 5)
    page.close()
