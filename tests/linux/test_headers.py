"""Numbers of the kernel's interface are those of its headers, where these are installed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from dshealthd.collectors import clock
from dshealthd.linux import (
    credentials,
    mounts,
    privileges,
    process_root,
    regular_files,
    socket_waits,
)
from dshealthd.probe.workers import launch, worker

INCLUDE = Path("/usr/include")
pytestmark = pytest.mark.skipif(not (INCLUDE / "linux").exists(), reason="no kernel headers")


def defined(header: str) -> dict[str, int]:
    """Return the numbers that a header defines."""
    text = (INCLUDE / header).read_text()
    found = re.findall(r"^#\s*define\s+(\w+)\s+(0x[0-9a-fA-F]+|0|[1-9]\d*)U?\b", text, re.MULTILINE)
    return {name: int(number, 0) for name, number in found}


@pytest.mark.parametrize(("header", "numbers"), [
    ("linux/prctl.h", {
        "PR_SET_PDEATHSIG": credentials.PR_SET_PDEATHSIG,
        "PR_GET_PDEATHSIG": credentials.PR_GET_PDEATHSIG,
        "PR_SET_KEEPCAPS": privileges.PR_SET_KEEPCAPS,
        "PR_SET_NO_NEW_PRIVS": privileges.PR_SET_NO_NEW_PRIVS,
        "PR_CAP_AMBIENT": privileges.PR_CAP_AMBIENT,
        "PR_CAP_AMBIENT_RAISE": privileges.PR_CAP_AMBIENT_RAISE,
    }),
    ("linux/prctl.h", {
        "PR_SET_PDEATHSIG": launch.PR_SET_PDEATHSIG,
        "PR_SET_NO_NEW_PRIVS": launch.PR_SET_NO_NEW_PRIVS,
        "PR_CAP_AMBIENT": launch.PR_CAP_AMBIENT,
        "PR_CAP_AMBIENT_CLEAR_ALL": launch.PR_CAP_AMBIENT_CLEAR_ALL,
    }),
    ("linux/prctl.h", {"PR_SET_PDEATHSIG": worker.PR_SET_PDEATHSIG}),
    ("linux/capability.h", {
        "_LINUX_CAPABILITY_VERSION_3": credentials._VERSION,
        "CAP_SYS_PTRACE": privileges.CAP_SYS_PTRACE,
    }),
    ("linux/auxvec.h", {"AT_NULL": credentials._AT_NULL, "AT_SECURE": credentials._AT_SECURE}),
    ("linux/openat2.h", {
        "RESOLVE_NO_MAGICLINKS": process_root._RESOLVE_NO_MAGICLINKS,
        "RESOLVE_IN_ROOT": process_root._RESOLVE_IN_ROOT,
    }),
    ("linux/timex.h", {"STA_NANO": clock._STA_NANO}),
    ("linux/fcntl.h", {
        "AT_EMPTY_PATH": mounts._EMPTY_PATH,
        "AT_STATX_DONT_SYNC": mounts._DONT_SYNC,
    }),
    ("linux/stat.h", {"STATX_MNT_ID": mounts._MOUNT_ID}),
])  # fmt: skip
def test_numbers(header: str, numbers: Mapping[str, int]) -> None:
    """Options, capabilities and bits."""
    found = defined(header)
    assert {name: found[name] for name in numbers} == numbers


def test_file_systems_that_store_nothing() -> None:
    """A file of these is never opened as a user's."""
    names = ("PROC_SUPER", "SYSFS", "DEBUGFS", "TRACEFS", "CGROUP_SUPER", "CGROUP2_SUPER", "BPF_FS")
    found = defined("linux/magic.h")
    magic = {found[f"{name}_MAGIC"] for name in (*names, "SECURITYFS")}
    assert magic == regular_files._NO_STORE


@pytest.mark.parametrize(("machine", "header"), [
    ("x86_64", "x86_64-linux-gnu/asm/unistd_64.h"),
    ("aarch64", "asm-generic/unistd.h"),
])  # fmt: skip
def test_system_calls(machine: str, header: str) -> None:
    """A thread is seen to wait by the call that it is in."""
    if not (INCLUDE / header).exists():
        pytest.skip("another machine's headers")
    calls = defined(header)
    names = {
        "receive": ("read", "recvfrom", "recvmsg"),
        "poll": ("poll", "ppoll"),
        "epoll": ("epoll_wait", "epoll_pwait", "epoll_pwait2"),
        "select": ("select", "pselect6"),
    }
    assert socket_waits._CALLS[machine] == {
        calls[f"__NR_{name}"]: kind
        for kind, each in names.items()
        for name in each
        if f"__NR_{name}" in calls
    }
