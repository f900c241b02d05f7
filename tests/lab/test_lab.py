"""The lab does what it says: its nodes, its faults, measured with small transfers, and nothing left
of it.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.lab import Lab, Node, NotPermitted, faults
from tests.lab.station import listen, start_time
from tests.stopwatch import Stopwatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.agents import Scrape

MBIT = 10**6 / 8
LIMITED = 20
FREE = 60 * MBIT
"""Less than a node that is not limited sends even while the processor has other work.

It is a hundred times this otherwise.
"""
SILENT = 0.7
"""Seconds after which a connection that gets no answer is given up."""
RESOLVER_SECONDS = 4.5
"""Less than the C library waits for an answer of a name server that says nothing
(resolv.conf(5))."""
TEMPERATURE = "dshealthd_gpu_temperature_celsius"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Three machines for the faults; each test starts the agents that it needs."""
    directory = tmp_path_factory.mktemp("lab")
    with Lab(directory, nodes=3, gpus=1, collectors=("memory",), start=False) as made:
        yield made


@pytest.fixture
def three(lab: Lab) -> Iterator[tuple[Node, Node, Node]]:
    """Its nodes, on whose network nothing may be left of a fault afterwards."""
    one, two, three = lab.nodes
    yield one, two, three
    for node in lab.nodes:
        node.stop()
    for station in (lab.services, *(node.station for node in lab.nodes)):
        assert station.tool("nft", "list", "ruleset") == ""
        shapers = station.tool("tc", "qdisc", "show").splitlines()
        assert {line.split()[1] for line in shapers} <= {"noqueue"}


class Rate(NamedTuple):
    """At how many bytes a second something was sent."""

    least: float
    """By the clock: what it was at least."""
    own: float
    """Less the time that other work took: what it would have been without that, at most."""


def rate(source: Node, target: Node, size: int = 1_000_000) -> Rate:
    """Return how fast one node sends another so many bytes, over TCP."""
    with listen(target.station) as listener:

        def receive() -> None:
            connection, _ = listener.accept()
            with connection:
                while connection.recv(1 << 16):
                    pass
                connection.sendall(b".")

        thread = threading.Thread(target=receive)
        thread.start()
        with source.connect(listener.getsockname()) as connection:
            watch, started = Stopwatch(os.getpid()), time.monotonic()
            connection.sendall(bytes(size))
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b"."
            passed, own = time.monotonic() - started, max(1e-3, watch.seconds())
        thread.join()
    return Rate(size / passed, size / own)


def sends(source: Node, target: Node, least: float, most: float = math.inf) -> None:
    """Check that one node can send another at `least` so many bytes a second, and never more than
    `most`.

    What it can do shows in one transfer; a machine that does much else spoils some.
    """
    end = time.monotonic() + 60
    while True:
        found = rate(source, target)
        assert found.least < most, f"{source.name} sends {target.name} {found.least:.0f} bytes/s"
        if found.own > least:
            return
        assert time.monotonic() < end, f"{source.name} sends {target.name} {found} bytes/s"


def connects(source: Node, target: Node, timeout: float = 60.0) -> str:
    """Return how connecting to a listening port ends: "" for well, or the error's name.

    Where it is to time out, `timeout` is SILENT.
    """
    with listen(target.station) as listener:
        try:
            source.connect(listener.getsockname(), timeout).close()
        except TimeoutError:
            return "timeout"
        except OSError as error:
            return errno.errorcode[error.errno or 0]
    return ""


def datagrams(source: Node, target: Node, number: int = 1) -> int:
    """Return how many of so many datagrams arrive."""

    def bound(node: Node) -> socket.socket:
        made = node.station.inside(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        made.bind((node.address, 0))
        return made

    arrived = 0
    with bound(source) as sender, bound(target) as receiver:
        receiver.settimeout(0.5)
        for sent in range(0, number, 200):  # what a receiver's buffer holds
            for _ in range(min(200, number - sent)):
                sender.sendto(b".", receiver.getsockname())
            with contextlib.suppress(TimeoutError):
                while arrived < number:
                    arrived += len(receiver.recv(1))
    return arrived


def output(node: Node, *command: str, timeout: float = 60.0) -> tuple[int, str]:
    """Run a command on a node; its status and what it prints.

    TimeoutExpired after it has been killed.
    """
    process = node.station.popen(command, stdout=subprocess.PIPE, text=True)
    try:
        said, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, said


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


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process and its children that have ended have used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


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
    started = time.monotonic()
    with Lab(tmp_path, nodes=4, progress=progress.append) as lab:
        print(f"4 agents serve after {time.monotonic() - started:.1f} s")
        # What they cost; how many seconds that is depends on what else the machine does.
        assert sum(map(cpu_seconds, [node.agent.pid for node in lab.nodes])) < 15
        assert progress[-1].startswith("agents: 4 of 4 serve after ")
        found = lab.wait(
            lambda scrapes: (
                len(scrapes) == 4
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
            assert output(node, "hostname") == (0, f"{node.name}\n")
            assert node.agent.workers()
        uuids = {
            dict(key)["uuid"] for scrape in found.values() for key in scrape.series[TEMPERATURE]
        }
        assert len(uuids) == 32
        assert (tmp_path / "hostfile").read_text().splitlines() == [
            f"node-{number} slots=8" for number in range(1, 5)
        ]
        assert network_of_this_machine() == before
        pids = [lab.services.pid, *(node.station.pid for node in lab.nodes)]
        namespaces = {os.stat(f"/proc/{pid}/ns/net").st_ino for pid in pids}
        assert len(namespaces) == 5
        assert namespaces <= network_namespaces(tmp_path)
    assert network_of_this_machine() == before
    assert not namespaces & network_namespaces(tmp_path)


def test_names(three: tuple[Node, Node, Node]) -> None:
    """A node resolves the others by name, all of them by one name, and what does not exist at
    once.
    """
    one, two, _ = three
    assert output(one, "getent", "hosts", "node-2")[1].split()[:2] == [two.address, "node-2"]
    assert output(one, "getent", "hosts", "services")[1].split()[1] == "services"
    addresses = {
        line.split()[0] for line in output(one, "getent", "ahostsv4", "nodes.lab")[1].splitlines()
    }
    assert addresses == {node.address for node in three}
    started = time.monotonic()
    assert output(one, "getent", "hosts", "node-99")[0] == 2
    assert time.monotonic() - started < RESOLVER_SECONDS


def test_agent_stops_starts_reloads(lab: Lab, three: tuple[Node, Node, Node]) -> None:
    """An agent stops, is killed with its workers, starts again, and reloads without a restart."""
    one, two, _ = three
    one.start()
    two.start()
    lab.wait(lambda scrapes: len(scrapes) == 2)
    one.stop()
    assert not one.runs
    assert set(lab.scrapes()) == {"node-2"}
    two.kill()
    two.config('[collectors.gpu]\nenabled = true\ninterval = "500ms"\n')
    two.start()
    found = lab.wait(lambda scrapes: scrapes and scrapes["node-2"].all(TEMPERATURE))
    assert found["node-2"].value("dshealthd_collector_up", collector="gpu") == 1
    workers = two.agent.workers()
    assert workers
    pid = two.agent.pid
    two.config("")
    lab.wait(lambda scrapes: "node-2" in scrapes and not scrapes["node-2"].all(TEMPERATURE))
    assert two.agent.pid == pid
    two.kill()
    assert ended(workers)


def test_slow(three: tuple[Node, Node, Node]) -> None:
    """A slow node is limited in both directions; the others are not, and it is not afterwards."""
    one, two, other = three
    with faults.slow(one, LIMITED):
        for source, target in ((one, two), (two, one)):
            sends(source, target, 10 * MBIT, 25 * MBIT)
        sends(two, other, FREE)
    sends(one, two, FREE)


def test_slow_pair(three: tuple[Node, Node, Node]) -> None:
    """A slow way limits two nodes in both directions, not their ways to a third, and can be had
    beside a slow node and another way.
    """
    one, two, other = three
    with faults.slow_pair(one, two, LIMITED):
        sends(one, two, 10 * MBIT, 25 * MBIT)
        sends(two, one, 10 * MBIT, 25 * MBIT)
        sends(one, other, FREE)
        with faults.slow_pair(one, other, 40):
            sends(one, other, 25 * MBIT, 50 * MBIT)
            sends(one, two, 10 * MBIT, 25 * MBIT)
        sends(one, other, FREE)
    with (
        faults.slow(one, 40),
        pytest.raises(ValueError, match="is limited already"),
        faults.slow(one, LIMITED),
    ):
        pass


def test_drop(three: tuple[Node, Node, Node]) -> None:
    """Between two nodes that are cut apart connections time out; a third is reached by both."""
    one, two, other = three
    with faults.drop(one, two):
        assert connects(one, two, SILENT) == connects(two, one, SILENT) == "timeout"
        assert connects(one, other) == connects(other, two) == ""
    assert connects(one, two) == ""


def test_drop_one_way(three: tuple[Node, Node, Node]) -> None:
    """One way can be cut alone: datagrams go the other way, and a connection does not come about
    from either side.
    """
    one, two, _ = three
    with faults.drop(one, two, both_ways=False):
        assert datagrams(one, two) == 0
        assert datagrams(two, one) == 1
        assert connects(one, two, SILENT) == connects(two, one, SILENT) == "timeout"
    assert datagrams(one, two) == 1


def test_drop_all(lab: Lab, three: tuple[Node, Node, Node]) -> None:
    """A node can be cut off from every other while its agent is still to be seen."""
    one, two, other = three
    one.start()
    with faults.drop_all(one):
        assert connects(one, two, SILENT) == connects(other, one, SILENT) == "timeout"
        assert connects(two, other) == ""
        assert set(lab.scrapes()) == {"node-1"}
    assert connects(one, two) == ""


def test_unplug(three: tuple[Node, Node, Node]) -> None:
    """A node whose cable is out has no carrier, and reaches nobody until it is in again."""
    one, two, _ = three
    with faults.unplug(one):
        assert output(one, "cat", "/sys/class/net/eth0/carrier") == (0, "0\n")
        assert connects(one, two, SILENT) != ""
    assert output(one, "cat", "/sys/class/net/eth0/carrier") == (0, "1\n")
    assert connects(one, two) == ""


def test_loss(three: tuple[Node, Node, Node]) -> None:
    """The share of packets that is lost is the one asked for, in both directions, and others lose
    none.
    """
    one, two, other = three
    with faults.loss(one, 0.5):
        for source, target in ((one, two), (two, one)):
            assert 320 < datagrams(source, target, 800) < 480  # 5.6 standard deviations
        assert datagrams(two, other, 100) == 100
    assert datagrams(one, two, 100) == 100


def test_reset(three: tuple[Node, Node, Node]) -> None:
    """A firewall's RST refuses one port, or all TCP of a node but its own, and cuts what is
    connected.
    """
    one, two, _ = three
    with listen(one.station) as shut, listen(one.station) as open_:
        with faults.reset(one, shut.getsockname()[1]):
            with pytest.raises(ConnectionRefusedError):
                two.connect(shut.getsockname())
            two.connect(open_.getsockname()).close()
        with two.connect(open_.getsockname()) as before, faults.reset(one):
            before.sendall(b".")
            with pytest.raises(ConnectionResetError):
                before.recv(1)
            assert connects(two, one) == connects(one, two) == "ECONNREFUSED"
            assert connects(one, one) == ""
        assert connects(two, one) == ""


def test_blackhole_dns(three: tuple[Node, Node, Node]) -> None:
    """In a black hole for DNS other nodes' names are neither found nor refused; others still find
    all.
    """
    one, two, _ = three
    with faults.blackhole_dns(one):
        with pytest.raises(subprocess.TimeoutExpired):
            output(one, "getent", "hosts", "node-2", timeout=1)
        assert output(one, "getent", "ahostsv4", "node-1")[0] == 0
        assert output(two, "getent", "hosts", "node-1")[0] == 0
    assert output(one, "getent", "hosts", "node-2")[0] == 0


def test_pause(lab: Lab, three: tuple[Node, Node, Node]) -> None:
    """A paused agent is missing from the scrapes, and answers again afterwards."""
    one, two, _ = three
    one.start()
    two.start()
    with faults.pause(one.agent.pid):
        assert "node-1" not in lab.scrapes(1.0)
        assert two.scrape()
    assert set(lab.scrapes()) == {"node-1", "node-2"}


def test_clock_offset(lab: Lab, three: tuple[Node, Node, Node]) -> None:
    """An agent's wall clock can be off by minutes, without its durations, and is right
    afterwards.
    """
    one, _, _ = three
    stamp = "dshealthd_collector_last_success_timestamp_seconds"

    def sampled(scrapes: Mapping[str, Scrape]) -> object:
        return "node-1" in scrapes and scrapes["node-1"].value(stamp, collector="memory")

    one.start()
    began = time.time()
    with faults.clock_offset(one, 288):
        found = lab.wait(sampled)["node-1"]
        said = found.value(stamp, collector="memory") or 0
        assert began + 288 - 1 < said < time.time() + 288 + 1
        assert (found.value("dshealthd_collector_duration_seconds", collector="memory") or 0) < 100
    found = lab.wait(sampled)["node-1"]
    assert began - 1 < (found.value(stamp, collector="memory") or 0) < time.time() + 1


SCRIPT = """
import sys
from pathlib import Path
from tests.lab import Lab

with Lab(Path(sys.argv[1]), 2, gpus=1) as lab:
    print(*(node.agent.pid for node in lab.nodes), flush=True)
    sys.stdin.read()
"""


def ended(pids: list[int], seconds: float = 60.0) -> bool:
    """Tell whether processes end in time."""
    end = time.monotonic() + seconds
    while any(start_time(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(start_time(pid) for pid in pids)


@pytest.mark.usefixtures("lab")  # skips without namespaces
def test_machines_end_with_their_lab(tmp_path: Path) -> None:
    """A killed lab's machines end, and with them their agents, however little these notice; nothing
    of this machine changes.
    """
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
    assert ended(agents)
    end = time.monotonic() + 60.0  # the agents' own children end after them
    while namespaces & network_namespaces(tmp_path):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert network_of_this_machine() == before


def test_failed_start_leaves_nothing(tmp_path: Path) -> None:
    """A lab whose agents cannot start says why, and leaves nothing."""
    before = network_of_this_machine()
    wrong = Lab(tmp_path, nodes=2, config="[web]\nlisten_adress = 1\n")
    with pytest.raises(AssertionError, match="unknown key; did you mean listen_address"), wrong:
        pass
    assert network_of_this_machine() == before


def test_loopback(tmp_path: Path) -> None:
    """Without namespaces agents have addresses of 127.0.0.0/8, and faults of the network are
    refused.
    """
    with Lab(tmp_path, nodes=2, namespaces=False) as lab:
        one, two = lab.nodes
        assert one.address.startswith("127.")
        assert one.address != two.address
        assert (tmp_path / "hostfile").read_text().split()[::2] == [one.address, two.address]
        found = lab.wait(
            lambda scrapes: len(scrapes) == 2 and all(s.all(TEMPERATURE) for s in scrapes.values())
        )
        assert found["node-2"].value(TEMPERATURE, gpu="0", sensor="core") == 32
        for fault in (faults.slow(one, LIMITED), faults.drop(one, two), faults.reset(one)):
            with pytest.raises(NotPermitted, match="without network namespaces"), fault:
                pass
        port = one.agent.port
        one.kill()
        one.start()
        assert one.agent.port == port
        pids = [node.agent.pid for node in lab.nodes]
    assert ended(pids)
