"""What processes use of what they may, by each way that kernels offer."""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from dshealthd.core.host import Host
from dshealthd.linux.process_limits import (
    Descriptors,
    ProcessLimits,
    Usage,
    parse_limits,
    parse_locked,
)
from tests.collectors.bench import child
from tests.jobs.machines import Machine

HELD = 37


def test_unlimited() -> None:
    """No limit is infinity."""
    text = (
        b"Limit Soft\nMax locked memory         unlimited  unlimited bytes\nMax open files   "
        b"         1024 4096 files\n"
    )
    assert parse_limits(text) == ProcessLimits(1024, math.inf)
    with pytest.raises(ValueError, match="no line"):
        parse_limits(b"Limit Soft\n")


def test_locked_memory() -> None:
    """Locked and pinned memory are in bytes."""
    assert parse_locked(b"Name:\tx\nVmLck:\t      64 kB\nVmPin:\t       8 kB\n") == (65536, 8192)
    assert parse_locked(b"Name:\tx\nState:\tZ (zombie)\n") == (0, 0)


def test_order() -> None:
    """The nearest to its limit is the worst, not the one with the most."""
    assert max(
        [Usage(900, 100_000), Usage(60, 64), Usage(1, 1024)], key=lambda usage: usage.order
    ) == Usage(60, 64)
    assert max(
        [Usage(0, math.inf), Usage(0, 65536), Usage(0, 1 << 30)], key=lambda usage: usage.order
    ) == Usage(0, 65536)
    assert Usage(5, 0).order > Usage(999, 1000).order


def test_real_child() -> None:
    """A real child's files and limits are exact, by the direct way and the directory."""
    program = (
        "import os, resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (123, 123))\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
        f"while len(os.listdir('/proc/self/fd')) - 1 < {HELD}: os.dup(0)"
    )
    with child(program) as pid:
        descriptors = Descriptors(Host())
        for _ in range(2):
            assert descriptors.open_files(pid) == Usage(HELD, 123)
            assert descriptors.limits(pid) == ProcessLimits(123, 65536)
            assert descriptors.worst(["1", str(pid), "4194304"]) is not None
            descriptors.direct = descriptors._own_pids = False


def test_direct_way_is_taken_where_the_kernel_has_it() -> None:
    """From Linux 6.2 on the count is one call; before, it is not mistaken for 0."""
    major, minor = (int(part) for part in os.uname().release.split(".")[:2])
    assert Descriptors(Host()).direct == ((major, minor) >= (6, 2))


def test_moved_procfs(tmp_path: Path) -> None:
    """A `/proc` of another machine is read as files."""
    machine = Machine(tmp_path / "proc")
    machine.process(os.getpid(), descriptors=5, soft="77")
    (machine.root / "self").symlink_to(str(os.getpid() + 1))
    descriptors = Descriptors(Host(procfs=machine.root))
    assert not descriptors.direct
    assert descriptors.open_files(os.getpid()) == Usage(5, 77)


def test_worst(tmp_path: Path) -> None:
    """Processes that cannot be read do not keep the worst of the others from being found."""
    machine = Machine(tmp_path / "proc")
    machine.process(5, descriptors=60, soft="64")
    machine.process(6, descriptors=100, soft="unlimited")
    machine.process(7, descriptors=1, soft="nonsense")
    descriptors = Descriptors(Host(procfs=machine.root))
    assert descriptors.worst(["999", "5", "6", "7"]) == ("5", Usage(60, 64))
    assert descriptors.worst(["999", "7"]) is None


@pytest.mark.skipif(os.getuid() != 0, reason="takes root, to become nobody")
def test_without_privileges() -> None:
    """Another user's limits come from the file where prlimit(2) is not allowed."""
    program = (
        "import os\nfrom dshealthd.core.host import Host\nfrom dshealthd.linux.process_limits "
        "import Descriptors\nparent = os.getppid(); os.setgid(65534); "
        "os.setuid(65534)\ndescriptors = "
        "Descriptors(Host())\nprint(descriptors.limits(parent).files, "
        "descriptors.open_files(parent).limit)"
    )
    said = subprocess.check_output([sys.executable, "-c", program], timeout=60)
    expected = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert [float(word) for word in said.split()] == [expected, expected]


def test_without_a_free_descriptor() -> None:
    """What the kernel supports is not known then, and is not settled."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            Descriptors(Host())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
