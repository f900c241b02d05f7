"""Who a process is after it has become another user for good."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dshealthd.linux.credentials import User, assumed

PROGRAM = """
import os, sys
from dshealthd.linux.credentials import User
from dshealthd.linux.privileges import become
own, wanted = map(int, sys.argv[1:])
os.setgroups([7])
os.setresuid(own, own, own)
become(User(wanted, 4321, (5,)))
print(os.getuid(), os.getgid(), os.getgroups())
"""


root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")


@root
def test_capabilities_are_whole_again() -> None:
    """Another user's files are opened without capabilities, which then are as before, all 41."""
    before = (
        Path("/proc/thread-self/status").read_text().partition("Cap")[2].partition("Seccomp")[0]
    )
    with assumed(User(4321, 4321)):
        assert "CapEff:\t0000000000000000" in Path("/proc/thread-self/status").read_text()
    assert (
        Path("/proc/thread-self/status").read_text().partition("Cap")[2].partition("Seccomp")[0]
        == before
    )


@root
@pytest.mark.parametrize(("own", "wanted", "after"), [
    (0, 4321, "4321 4321 [5]"),
    (0, 0, "0 0 [7]"),
    (65534, 4321, "65534 0 [7]"),
])  # fmt: skip
def test_become(own: int, wanted: int, after: str) -> None:
    """Root becomes the user with its groups; what is asked to be root, or is not, stays."""
    command = [sys.executable, "-c", PROGRAM, str(own), str(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == after
