"""Ports, loopback, names and members: each fault made in a network namespace, found, and mended."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Iterator

import pytest

from dshealthd.core.host import Host
from dshealthd.doctor.check import Result
from dshealthd.doctor.node import host_name
from tests.doctor.looks import apply, look, named, outcomes, results
from tests.doctor.machine import Machine
from tests.netns import leave_time_wait, listener, network_namespace, ss

PORT = 29501


@pytest.fixture
def _namespace() -> Iterator[None]:
    with network_namespace():
        yield


def ip(command: str) -> None:
    """Run a command of iproute2."""
    subprocess.run(["ip", *command.split()], check=True, timeout=60)


@pytest.mark.usefixtures("_namespace")
def test_rendezvous_ports_in_time_wait() -> None:
    """Most rendezvous ports held by sockets in TIME_WAIT are a warning until they are gone; many
    such sockets on one port are none.
    """
    sources = ("tcp", "tcp_limits", "rendezvous")
    assert outcomes(named("listeners"), look(*sources)) == ["ok"]
    with listener("127.0.0.1", PORT) as server:
        leave_time_wait(server, 110, server=True)
    assert outcomes(named("listeners"), look(*sources)) == ["ok"]
    for port in range(PORT + 1, PORT + 52):
        with listener("127.0.0.1", port) as server:
            leave_time_wait(server, 1, server=True)
    (found,) = results(named("listeners"), look(*sources))
    assert (named("listeners").slug, found.outcome.value) == ("address-in-use", "warning")
    assert (found.limit, float(found.value or 0) > 0.5) == ("0.5", True)
    assert found.remedy
    subprocess.run(
        ["ss", "-K", "-tn", "state", "time-wait"], check=True, capture_output=True, timeout=60
    )
    if not ss("state", "time-wait"):  # a kernel without INET_DIAG_DESTROY keeps them
        assert outcomes(named("listeners"), look(*sources)) == ["ok"]


@pytest.mark.usefixtures("_namespace")
def test_rendezvous_ports_inside_the_ephemeral_range() -> None:
    """An overlap is a warning; the remedy, reserving the ports, ends it."""
    sources = ("tcp", "tcp_limits", "rendezvous")
    with open("/proc/sys/net/ipv4/ip_local_port_range", "w", encoding="ascii") as file:
        file.write("20000 60999")
    (found,) = results(named("ports"), look(*sources))
    assert "29500-29600 are inside the ephemeral range 20000-60999" in found.text
    apply(found)
    assert outcomes(named("ports"), look(*sources)) == ["ok"]


def test_loopback_that_is_down() -> None:
    """Without the loopback interface TCP to 127.0.0.1 fails: critical."""
    with network_namespace(loopback=False):
        (found,) = results(named("loopback"), look("loopback"))
        assert (named("loopback").slug, found.outcome.value) == ("loopback-refused", "critical")
    with network_namespace():
        assert outcomes(named("loopback"), look("loopback")) == ["ok"]


OF_JOBS = ("rendezvous", "job_environment", "nccl_ras")
"""Collectors that tell whether the ranks of jobs meet."""


@pytest.mark.usefixtures("_namespace")
def test_master_that_does_not_answer() -> None:
    """A connection to a rendezvous port whose packets are dropped waits in SYN_SENT."""
    ip("link add far0 type veth peer name far1")
    ip("addr add 10.9.0.1/24 dev far0")
    ip("link set far0 up")
    ip("link set far1 up")
    # Known to the kernel, which otherwise gives up to resolve the address after three seconds.
    ip("neighbour add 10.9.0.2 lladdr 02:00:00:00:00:02 dev far0")
    assert outcomes(named("job-rendezvous"), look(*OF_JOBS)) == ["ok"]
    with socket.socket() as client:
        client.settimeout(0)
        client.connect_ex(("10.9.0.2", PORT))
        (found,) = results(named("job-rendezvous"), look(*OF_JOBS))
    assert named("job-rendezvous").slug == "ranks-stuck-at-init"
    assert found.outcome.value == "warning"
    ip("addr add 10.9.0.2/24 dev lo")  # the way there works again
    with listener("10.9.0.2", PORT) as master, socket.create_connection(master.getsockname(), 20):
        assert outcomes(named("job-rendezvous"), look(*OF_JOBS)) == ["ok"]


@pytest.mark.usefixtures("_namespace")
def test_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of jobs across nodes, only an address that others cannot reach, or none, is a warning."""
    ip("link add docker0 type bridge")
    ip("addr add 172.17.0.1/16 dev docker0")
    ip("link set docker0 up")
    ip("link add eth0 type veth peer name eth1")
    ip("addr add 10.9.0.1/24 dev eth0")
    ip("link set eth0 up")
    assert host_name.HOST_NAME.slug == "container-address"
    for name, several, outcome, word in (
        ("localhost", True, "warning", "loopback"),
        ("localhost", False, "ok", "fine for single-node jobs"),
        ("172.17.0.1", True, "warning", "container bridge"),
        ("172.17.0.1", False, "ok", "fine for single-node jobs"),
        ("10.9.0.1", True, "ok", "an address of this node"),
        ("10.8.0.1", True, "warning", "no interface of this node"),
        ("nobody.invalid", False, "unknown", "no name server answered"),
    ):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        (found,) = results(host_name.HOST_NAME, look(several=several))
        assert (found.outcome.value, word in found.text) == (outcome, True), found
        assert bool(found.remedy) == (outcome != "ok")

    def nobody(*_: object, **__: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    (found,) = results(host_name.HOST_NAME, look())
    assert (found.outcome.value, "does not resolve" in found.text) == ("warning", True)


def test_infiniband_ports_of_one_board(make_machine: Callable[..., Machine]) -> None:
    """A port that is linked, but not configured, is found; without a cable, it may be meant so."""
    machine = make_machine(gpus=0)
    machine.add_infiniband("irdma0", "mlx5_2", "mlx5_3")
    port = machine.sys / "class/infiniband/mlx5_1/ports/1"
    well = {name: (port / name).read_text() for name in ("state", "phys_state")}

    def looked(**values: str) -> list[Result]:
        for name, value in {**well, **values}.items():
            (port / name).write_text(value)
        host = Host(sysfs=machine.sys, dev=machine.dev)
        return results(named("infiniband"), look("infiniband", host=host))

    assert [one.outcome.value for one in looked()] == ["ok"]
    (unmanaged,) = looked(state="2: INIT\n")
    assert (unmanaged.outcome.value, unmanaged.component) == ("warning", "mlx5_1/1")
    assert "no subnet manager" in unmanaged.text
    assert "sminfo" in unmanaged.remedy
    assert [one.outcome.value for one in looked()] == ["ok"]
    (unwired,) = looked(state="1: DOWN\n", phys_state="2: Polling\n")
    assert unwired.outcome.value == "ok"
