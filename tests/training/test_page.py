"""A heartbeat's page that is closed, or was never created."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dshealthd.training.message import ROOM
from dshealthd.training.page import Page


@pytest.mark.parametrize("closed", [True, False])
def test_nothing_is_written_without_a_page(*, closed: bool) -> None:
    """Another thread may have closed it just now: no training ends by that."""
    page = Page()
    if closed:
        page.close()
    page.write(b"x")
    page.write_note(b"x" * 2 * ROOM)
    page.wait(1, 1)
    page.describe(1, 600)
    assert not page.is_open


DAEMON = """
import gc, os, sys
from dshealthd.training.page import Page
page = Page()
page.open()
os.closerange(3, 4096)
files = [open(os.path.join(sys.argv[1], str(number)), "w") for number in range(5)]
for file in files:
    file.write("mine")
if sys.argv[2] == "closed":
    page.close()
elif sys.argv[2] == "deleted":
    del page
gc.collect()
"""
"""Closes all descriptors that it does not know, and opens files of its own, which are flushed as it
ends."""


@pytest.mark.parametrize("how", ["closed", "deleted", "left"])
def test_descriptors_of_the_program_are_left_alone(tmp_path: Path, how: str) -> None:
    """A number that was the page's, and is a file's of the program by now, is not closed."""
    command = [sys.executable, "-c", DAEMON, str(tmp_path), how]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    assert ended.stderr == ""
    assert [file.read_text() for file in sorted(tmp_path.iterdir())] == ["mine"] * 5
