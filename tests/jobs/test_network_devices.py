"""Which interfaces and adapters a process could use.

On this machine, and in a network of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dshealthd.core.collector import Context, Fault, Reason
from dshealthd.core.host import Host
from dshealthd.jobs.network_devices import NetworkDevices, parse_names
from dshealthd.jobs.processes import namespace

HEADER = "Inter-|   Receive\n face |bytes\n"


def devices(
    host: Host, entering: Callable[[str], Fault | None] = lambda _part: None
) -> NetworkDevices:
    """Return what there is on a host."""
    return NetworkDevices(Context(host=host, entering=entering))


def test_names() -> None:
    """Interfaces are named with their colons: an alias has one of its own."""
    assert parse_names(f"{HEADER}    lo: 1 2 3\neth0:1: 4 5\n  ib0:7 8\n") == [
        "lo",
        "eth0:1",
        "ib0",
    ]


def test_this_machine() -> None:
    """The interfaces of this process are those that Python sees, and loopback runs if it is up."""
    found = devices(Host()).interfaces(os.getpid(), "")
    assert found.keys() == set(os.listdir("/sys/class/net")) - {"bonding_masters"}
    assert found["lo"] == bool(
        int(Path("/sys/class/net/lo/flags").read_text(encoding="ascii"), 16) & 1
    )


def test_network_of_its_own() -> None:
    """Of a process in another network namespace it is known which interfaces there are, and not
    whether they run.
    """
    if os.getuid() != 0:
        pytest.skip("takes root, for a network namespace")
    command = ["unshare", "--net", sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        if not child.stdout.readline():
            pytest.skip("network namespaces are not permitted here")
        both = devices(Host())
        network = namespace(Host(), child.pid)
        theirs, ours = both.interfaces(child.pid, network), both.interfaces(os.getpid(), "")
        child.communicate(b"\n", timeout=60)
    assert theirs["lo"] is None
    assert ours["lo"] is not None


def test_process_that_is_gone(tmp_path: Path) -> None:
    """A process that has ended has no interfaces, and that is told from having none."""
    with pytest.raises(FileNotFoundError):
        devices(Host(procfs=tmp_path)).interfaces(4711, "")


def test_adapters(tmp_path: Path) -> None:
    """Ports are read once a sweep; one that cannot be read is there, in an unknown state, and a
    fault.
    """
    for name, states in (
        ("mlx5_0", ("4: ACTIVE", "1: DOWN")),
        ("mlx5_1", ("rubbish",)),
        ("mlx5_2", ("4: ACTIVE",)),
    ):
        for port, state in enumerate(states, 1):
            place = tmp_path / f"class/infiniband/{name}/ports/{port}"
            place.mkdir(parents=True)
            (place / "state").write_text(state)
    approached = []

    def entering(part: str) -> Fault | None:
        approached.append(part)
        return Fault(part, Reason.STUCK, "hung") if part == "adapter mlx5_2" else None

    found = devices(Host(sysfs=tmp_path), entering)
    for _ in range(2):
        assert found.ports() == {
            ("mlx5_0", 1): True,
            ("mlx5_0", 2): False,
            ("mlx5_1", 1): None,
            ("mlx5_2", 1): None,
        }
    assert approached == ["adapter mlx5_0", "adapter mlx5_1", "adapter mlx5_2"]
    assert {fault.part: fault.reason for fault in found.faults} == {
        "adapter mlx5_1": Reason.MALFORMED,
        "adapter mlx5_2": Reason.STUCK,
    }
