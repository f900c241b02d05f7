"""The lab does what it says: its nodes, and nothing left of it. What its faults do, and what it is
without namespaces, is seen by the scenes that need them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab import Lab
from tests.processes import runs
from tests.waiting import until

TEMPERATURE = "dshealthd_gpu_temperature_celsius"


def network_of_this_machine() -> list[str]:
    """Return what a lab must not change."""
    commands = (
        ["ip", "-o", "link"],
        ["ip", "-o", "addr"],
        ["ip", "route"],
        ["ip", "netns"],
        ["nft", "--stateless", "list", "ruleset"],  # without counters, which anything moves
        ["tc", "qdisc"],
    )
    said = [
        subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        for command in commands
    ]
    mounts = [
        line
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
        if "/etc/" in line or "/node-" in line
    ]
    return [*said, socket.gethostname(), *mounts]


def network_namespaces(directory: Path) -> set[int]:
    """Return the inodes of the network namespaces in which processes of a directory's lab run.

    They are told by their arguments or environment. Whatever else is in a namespace of such an
    inode does not count: the kernel gives it to another test's as soon as the lab's has gone.
    """
    found = set()
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            said = [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
            if any(os.fsencode(directory) in text for text in said):
                found.add(os.stat(f"/proc/{pid}/ns/net").st_ino)
    return found


def test_nodes(tmp_path: Path) -> None:
    """Each agent has GPUs, interfaces and processes of its own; this machine's network stays as it
    is.
    """
    before = network_of_this_machine()
    progress: list[str] = []
    with Lab(tmp_path, nodes=2, progress=progress.append) as lab:
        assert progress[-1].startswith("agents: 2 of 2 serve after ")
        found = lab.wait(
            lambda scrapes: (
                len(scrapes) == 2
                and all(
                    len(s.all(TEMPERATURE, sensor="core")) == 8 and s.all("dshealthd_network_up")
                    for s in scrapes.values()
                )
            )
        )
        for number, node in enumerate(lab.nodes, start=1):
            scrape = found[node.name]
            assert (node.name, node.member) == (f"node-{number}", f"node-{number}")
            assert scrape.value(TEMPERATURE, gpu="0", sensor="core") == 30 + number
            assert scrape.value("dshealthd_gpus_expected") == 8
            assert scrape.value("dshealthd_gpus_visible") == 8
            devices = {dict(key)["device"] for key in scrape.series["dshealthd_network_up"]}
            assert devices == {"eth0"}
            assert node.status()
            assert node.station.tool("hostname").strip() == node.name
            assert node.agent.workers()
        uuids = {
            dict(key)["uuid"] for scrape in found.values() for key in scrape.series[TEMPERATURE]
        }
        assert len(uuids) == 16
        assert (tmp_path / "hostfile").read_text().splitlines() == [
            f"node-{number} slots=8" for number in range(1, 3)
        ]
        assert network_of_this_machine() == before
        pids = [lab.services.pid, *(node.station.pid for node in lab.nodes)]
        namespaces = {os.stat(f"/proc/{pid}/ns/net").st_ino for pid in pids}
        assert len(namespaces) == 3
        assert namespaces <= network_namespaces(tmp_path)
    assert network_of_this_machine() == before
    assert not namespaces & network_namespaces(tmp_path)


SCRIPT = """
import sys
from pathlib import Path
from tests.lab import Lab

with Lab(Path(sys.argv[1]), 2, gpus=1) as lab:
    print(*(node.agent.pid for node in lab.nodes), flush=True)
    sys.stdin.read()
"""


def test_machines_end_with_their_lab(tmp_path: Path) -> None:
    """A killed lab's machines end, and with them their agents, however little these notice; nothing
    of this machine changes.
    """
    with Lab(tmp_path / "first", nodes=1, start=False):
        pass  # skips without namespaces
    before = network_of_this_machine()
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            agents = list(map(int, process.stdout.readline().split()))
            namespaces = {os.stat(f"/proc/{pid}/ns/net").st_ino for pid in agents}
            assert len(namespaces) == 2
            assert namespaces <= network_namespaces(tmp_path)
            os.kill(agents[0], signal.SIGSTOP)
        finally:
            process.kill()
    until(lambda: not any(map(runs, agents)))
    until(lambda: not (namespaces & network_namespaces(tmp_path)))
    assert network_of_this_machine() == before


def test_failed_start_leaves_nothing(tmp_path: Path) -> None:
    """A lab whose agents cannot start says why, and leaves nothing."""
    before = network_of_this_machine()
    wrong = Lab(tmp_path, nodes=2, config="[web]\nlisten_adress = 1\n")
    with pytest.raises(AssertionError, match="unknown key; did you mean listen_address"), wrong:
        pass
    assert network_of_this_machine() == before
