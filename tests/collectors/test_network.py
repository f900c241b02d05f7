"""Network interfaces from a tree like /proc and /sys, and against `ip` on the machine itself."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dshealthd.collectors.network import (
    CARRIER_CHANGES,
    MTU,
    RECEIVE_BYTES,
    SPEED,
    TRANSMIT_BYTES,
    TRANSMIT_DROPS,
    UP,
    Network,
    NetworkOptions,
    speed_of,
)
from dshealthd.core.collector import Context, Fault, Metric, Reason
from dshealthd.core.host import Host, read
from dshealthd.core.result import CollectionOutcome, Result, attempt

if TYPE_CHECKING:
    from collections.abc import Mapping

FIXTURES = Path(__file__).parent / "fixtures" / "network"
WITH_HARDWARE = {"eno1", "eno2", "ens3f0np0", "ibp24s0", "eth0", "usb0"}
ASKED = {"eno1", "bond0", "ens3f0np0", "ibp24s0", "eth0"}
"""Those that are up, so that their speed can be known."""


class Bench:
    """A collector on a copy of the fixture.

    Notes what is read and approached, and refuses files that it is told to.
    """

    def __init__(self, root: Path, **options: object) -> None:
        """Make the collector; `options` are its own."""
        self.root = root
        self.now = 0.0
        self.refused: dict[str, int] = {}
        self.touched: list[str] = []
        self.blocked: dict[str, Fault] = {}
        host = Host(procfs=root / "proc", sysfs=root / "sys")
        context = Context(host=host, monotonic=lambda: self.now, entering=self._approach)
        self.collector = Network(NetworkOptions(**options), context, self._read)  # type: ignore[arg-type] # checked where the config is decoded

    def _approach(self, part: str) -> Fault | None:
        self.touched.append(part)
        return self.blocked.get(part)

    def _read(self, place: str) -> str:
        name = "/".join(place.split("/")[-2:])
        self.touched.append(name)
        if name in self.refused:
            raise OSError(self.refused[name], os.strerror(self.refused[name]), place)
        return read(place)

    def collect(self) -> Result:
        """Collect once; `touched` is of this time only."""
        self.touched.clear()
        return attempt(self.collector)

    def write(self, path: str, text: str) -> None:
        """Change a file of /sys/class/net."""
        (self.root / "sys/class/net" / path).write_text(text + "\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a copy of the fixture."""
    return Path(shutil.copytree(FIXTURES, tmp_path / "root", symlinks=True))


@pytest.fixture
def bench(root: Path) -> Bench:
    """Return a collector on a copy of the fixture."""
    return Bench(root)


def values(result: Result, metric: Metric) -> Mapping[str, float]:
    """Return the values of a metric by interface."""
    return {sample.labels[0]: sample.value for sample in result.samples if sample.metric is metric}


def asked(bench: Bench) -> set[str]:
    """Return the interfaces whose speed was asked for at the last collection."""
    return {name.removesuffix("/speed") for name in bench.touched if name.endswith("/speed")}


def test_include_and_exclude(root: Path) -> None:
    """Patterns add interfaces and take them away."""
    result = Bench(root, include=("veth*", "ens3f0v*", "lo"), exclude=("eno*", "lo")).collect()
    assert set(values(result, MTU)) == {
        "bond0",
        "ens3f0np0",
        "ens3f0v0",
        "ibp24s0",
        "eth0",
        "usb0",
        "veth1a2b3c",
    }


def test_absent(root: Path, tmp_path: Path) -> None:
    """A machine without such an interface says so, before a worker starts for it, and in the
    collector too.
    """
    host = Host(procfs=root / "proc", sysfs=root / "sys")
    assert Network.absent(NetworkOptions(), host) is None
    nothing = NetworkOptions(exclude=("*",))
    assert Network.absent(nothing, host) == f"{root}/sys/class/net has no interface with hardware"
    assert Network.absent(NetworkOptions(), Host(sysfs=tmp_path)) is not None
    assert Bench(root, exclude=("*",)).collect().outcome is CollectionOutcome.NOT_AVAILABLE


def test_speed_is_read_when_the_carrier_changes(bench: Bench) -> None:
    """The speed of an interface that is up is read at first, when its carrier has changed, and once
    a minute; the value stays between.
    """
    assert values(bench.collect(), SPEED)["eno1"] == 25e9 / 8
    assert asked(bench) == ASKED
    bench.now = 59
    assert values(bench.collect(), SPEED)["eno1"] == 25e9 / 8
    assert not asked(bench)
    bench.write("eno1/carrier_changes", "5")
    bench.write("eno1/speed", "10000")
    assert values(bench.collect(), SPEED)["eno1"] == 10e9 / 8
    assert asked(bench) == {"eno1"}
    bench.now = 60
    bench.collect()
    assert asked(bench) == ASKED - {"eno1"}


def test_speed_is_unknown_without_a_link(bench: Bench) -> None:
    """A driver that answers EINVAL has no speed and is no fault."""
    bench.refused = {"eno1/speed": errno.EINVAL, "bond0/speed": errno.EOPNOTSUPP}
    bench.write("ibp24s0/operstate", "down")
    result = bench.collect()
    assert not result.faults
    assert set(values(result, SPEED)) == {"ens3f0np0"}
    assert "ibp24s0" not in asked(bench)
    assert values(result, UP)["ibp24s0"] == 0


def test_only_speed_is_approached(bench: Bench) -> None:
    """What can hang, and nothing else, is approached, just before it is read."""
    bench.collect()
    approached = [index for index, name in enumerate(bench.touched) if name.startswith("network ")]
    assert {bench.touched[index + 1] for index in approached} == {f"{name}/speed" for name in ASKED}
    bench.collect()
    assert not any(name.startswith("network ") for name in bench.touched)


def test_speed_under_quarantine(bench: Bench) -> None:
    """An interface whose driver hung has all but its speed, which is not asked for, and a fault."""
    fault = Fault("network eno1", Reason.TIMEOUT, "hangs")
    bench.blocked = {fault.part: fault}
    for _ in range(2):
        result = bench.collect()
        assert result.outcome is CollectionOutcome.OK
        assert result.faults == (fault,)
        assert "eno1" not in asked(bench)
        assert set(values(result, SPEED)) == {"bond0", "ens3f0np0", "ibp24s0"}
        assert values(result, UP)["eno1"] == 1
        assert values(result, TRANSMIT_DROPS)["eno1"] == 7
    bench.blocked = {}
    assert values(bench.collect(), SPEED)["eno1"] == 25e9 / 8


def test_odd_interface_leaves_the_others_alone(bench: Bench) -> None:
    """Files that fail or make no sense are one fault an interface."""
    bench.refused = {"eno1/mtu": errno.EIO, "eth0/speed": errno.EIO}
    bench.write("bond0/operstate", "sideways")
    bench.write("ibp24s0/carrier_changes", "few")
    result = bench.collect()
    assert result.outcome is CollectionOutcome.OK
    assert {fault.part: fault.reason for fault in result.faults} == {
        "network eno1": Reason.IO_ERROR,
        "network eth0": Reason.IO_ERROR,
        "network bond0": Reason.MALFORMED,
        "network ibp24s0": Reason.MALFORMED,
    }
    assert all(fault.part.split()[1] in fault.detail for fault in result.faults)
    assert values(result, RECEIVE_BYTES)["eno1"] == 99182736455
    assert set(values(result, CARRIER_CHANGES)) == {"eno2", "ens3f0np0", "usb0", "eth0"}


def test_nothing_can_be_read(bench: Bench) -> None:
    """When every interface fails, the attempt fails."""
    bench.refused = {f"{name}/operstate": errno.EACCES for name in (*WITH_HARDWARE, "bond0")}
    result = bench.collect()
    assert result.outcome is CollectionOutcome.ERROR
    assert result.reason is Reason.PERMISSION_DENIED
    assert len(values(result, RECEIVE_BYTES)) == 7
    assert not values(result, UP)


def test_malformed_traffic(bench: Bench) -> None:
    """A line of /proc/net/dev that is too short is a fault of its interface."""
    place = bench.root / "proc/net/dev"
    lines = place.read_text().splitlines()
    place.write_text(
        "\n".join(line[:40] if "eno1:" in line or "docker0:" in line else line for line in lines)
        + "\n"
    )
    result = bench.collect()
    assert [(fault.part, fault.reason) for fault in result.faults] == [
        ("network eno1", Reason.MALFORMED)
    ]
    assert "eno1" not in values(result, RECEIVE_BYTES)
    assert len(values(result, RECEIVE_BYTES)) == 6


def test_interface_vanishes_and_returns(bench: Bench) -> None:
    """An interface that is gone has no series."""
    bench.collect()
    link, proc = bench.root / "sys/class/net/ibp24s0", bench.root / "proc/net/dev"
    target, text = os.readlink(link), proc.read_text()
    link.unlink()
    proc.write_text(
        "".join(line for line in text.splitlines(keepends=True) if "ibp24s0" not in line)
    )
    result = bench.collect()
    assert not result.faults
    assert "ibp24s0" not in values(result, RECEIVE_BYTES)
    link.symlink_to(target)
    bench.write("ibp24s0/speed", "200000")
    proc.write_text(text)
    assert values(bench.collect(), SPEED)["ibp24s0"] == 25e9


def test_against_ip() -> None:
    """On this machine, traffic, MTU and state are what `ip` gets over netlink just before and just
    after.
    """
    host = Host()
    if Network.absent(NetworkOptions(), host) is not None or shutil.which("ip") is None:
        pytest.skip("no interface with hardware, or no ip")
    collector = Network(NetworkOptions(), Context(host=host))
    before = _ip()
    result = attempt(collector)
    after = _ip()
    assert result.outcome is CollectionOutcome.OK
    assert values(result, MTU)
    for name, mtu in values(result, MTU).items():
        assert mtu == after[name]["mtu"]
        for metric, path in ((RECEIVE_BYTES, "rx bytes"), (TRANSMIT_BYTES, "tx bytes")):
            assert int(before[name][path]) <= values(result, metric)[name] <= int(after[name][path])
        state = before[name]["operstate"]
        if state == after[name]["operstate"] and state != "UNKNOWN":
            assert values(result, UP)[name] == (state == "UP")


def _ip() -> Mapping[str, dict[str, int | str]]:
    shown = subprocess.run(["ip", "-s", "-j", "link"], capture_output=True, check=True)
    links = json.loads(shown.stdout)
    counts = {
        link["ifname"]: {f"{way} bytes": link["stats64"][way]["bytes"] for way in ("rx", "tx")}
        for link in links
    }
    return {
        link["ifname"]: {
            "mtu": link["mtu"],
            "operstate": link["operstate"],
            **counts[link["ifname"]],
        }
        for link in links
    }


@pytest.mark.parametrize(
    ("megabits", "speed"),
    [(25000, 3.125e9), (10, 1.25e6), (-1, None), (0, None), (4294967295, None)],
)
def test_speed(megabits: int, speed: float | None) -> None:
    """Speed is in bytes per second; -1, also when written without its sign, means unknown."""
    assert speed_of(megabits) == speed
