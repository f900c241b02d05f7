"""Who a process is after it has become another user for good."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")
@pytest.mark.parametrize(("own", "wanted", "after"), [
    (0, 4321, "4321 4321 [5]"),
    (0, 0, "0 0 [7]"),
    (65534, 4321, "65534 0 [7]"),
])  # fmt: skip
def test_become(own: int, wanted: int, after: str) -> None:
    """Root becomes the user with its groups; what is asked to be root, or is not, stays."""
    command = [sys.executable, "-c", PROGRAM, str(own), str(wanted)]
    assert subprocess.check_output(command, text=True, timeout=60).strip() == after
