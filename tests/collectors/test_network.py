"""Network interfaces from a tree like /proc and /sys, and against `ip` on the machine itself."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
from dshealthd.core.collector import Metric, Reason
from dshealthd.core.host import Host, read
from dshealthd.core.result import CollectionOutcome, CollectionResult
from tests.collectors.bench import Bench, Reader, copied, reasons, values, write

WITH_HARDWARE = {"eno1", "eno2", "ens3f0np0", "ibp24s0", "eth0", "usb0"}
ASKED = {"eno1", "bond0", "ens3f0np0", "ibp24s0", "eth0"}
"""Those that are up, so that their speed can be known."""


class Interfaces(Bench):
    """A collector on a copy of the fixture; files are read, and parts entered, into one list."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root, self.reader = root, Reader(read)
        super().__init__("network", root, self.reader, **options)
        self.reader.seen = self.entered

    def write(self, path: str, text: str) -> None:
        """Change a file of /sys/class/net."""
        write(self.root / "sys/class/net", {path: text})

    def look(self, seconds: float = 0.0) -> tuple[CollectionResult, set[str]]:
        """Collect, and return the interfaces whose speed was asked for as well."""
        self.entered.clear()
        result = self.collect(seconds)
        return result, {place.split("/")[-2] for place in self.entered if place.endswith("/speed")}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a copy of the fixture."""
    return copied("network", tmp_path)


@pytest.fixture
def bench(root: Path) -> Interfaces:
    """Return a collector on a copy of the fixture."""
    return Interfaces(root)


def by_name(result: CollectionResult, metric: Metric) -> dict[str, float]:
    """Return the values of a metric by interface."""
    return {name: value for (name, *_), value in values(result, metric).items()}


def test_include_and_exclude(root: Path) -> None:
    """Patterns add interfaces and take them away."""
    result = Bench(
        "network", root, include=("veth*", "ens3f0v*", "lo"), exclude=("eno*", "lo")
    ).collect()
    assert set(by_name(result, MTU)) == {
        "bond0",
        "ens3f0np0",
        "ens3f0v0",
        "ibp24s0",
        "eth0",
        "usb0",
        "veth1a2b3c",
    }


def test_absent(root: Path, tmp_path: Path) -> None:
    """A machine without such an interface says so, before a worker starts, and after."""
    host = Host(procfs=root / "proc", sysfs=root / "sys")
    assert Network.absent(NetworkOptions(), host) is None
    nothing = NetworkOptions(exclude=("*",))
    assert Network.absent(nothing, host) == f"{root}/sys/class/net has no interface with hardware"
    assert Network.absent(NetworkOptions(), Host(sysfs=tmp_path)) is not None
    assert (
        Bench("network", root, exclude=("*",)).collect().outcome is CollectionOutcome.NOT_AVAILABLE
    )


def test_speed_is_read_when_the_carrier_changes(bench: Interfaces) -> None:
    """The speed is read at first, when the carrier has changed, and once a minute."""
    for seconds, changes, speed, asked in (
        (0, "4", 25e9, ASKED),
        (59, "4", 25e9, set()),
        (0, "5", 10e9, {"eno1"}),
        (1, "5", 10e9, ASKED - {"eno1"}),
    ):
        bench.write("eno1/carrier_changes", changes)
        bench.write("eno1/speed", f"{speed / 1e6:.0f}")
        result, found = bench.look(seconds)
        assert (by_name(result, SPEED)["eno1"], found) == (speed / 8, asked)


def test_speed_is_unknown_without_a_link(bench: Interfaces) -> None:
    """A driver that answers EINVAL has no speed and is no fault."""
    bench.reader.refused = {"eno1/speed": errno.EINVAL, "bond0/speed": errno.EOPNOTSUPP}
    bench.write("ibp24s0/operstate", "down")
    result, asked = bench.look()
    assert not result.faults
    assert set(by_name(result, SPEED)) == {"ens3f0np0"}
    assert "ibp24s0" not in asked
    assert by_name(result, UP)["ibp24s0"] == 0


def test_only_speed_is_approached(bench: Interfaces) -> None:
    """What can hang, and nothing else, is approached, just before it is read."""
    bench.look()
    after = [next for part, next in itertools.pairwise(bench.entered) if "network " in part[:8]]
    assert {"/".join(place.split("/")[-2:]) for place in after} == {
        f"{name}/speed" for name in ASKED
    }
    bench.look()
    assert not any(part.startswith("network ") for part in bench.entered)


def test_speed_under_quarantine(bench: Interfaces) -> None:
    """An interface whose driver hung has all but its speed, which is not asked for, and a fault."""
    bench.hung = {"network eno1": Reason.TIMEOUT}
    for _ in range(2):
        result, asked = bench.look()
        assert result.outcome is CollectionOutcome.OK
        assert reasons(result) == bench.hung
        assert "eno1" not in asked
        assert set(by_name(result, SPEED)) == {"bond0", "ens3f0np0", "ibp24s0"}
        assert by_name(result, UP)["eno1"] == 1
        assert by_name(result, TRANSMIT_DROPS)["eno1"] == 7
    bench.hung = {}
    assert by_name(bench.collect(), SPEED)["eno1"] == 25e9 / 8


def test_odd_interface_leaves_the_others_alone(bench: Interfaces) -> None:
    """Files that fail or make no sense are one fault an interface."""
    bench.reader.refused = {"eno1/mtu": errno.EIO, "eth0/speed": errno.EIO}
    bench.write("bond0/operstate", "sideways")
    bench.write("ibp24s0/carrier_changes", "few")
    result = bench.collect()
    assert result.outcome is CollectionOutcome.OK
    assert reasons(result) == {
        "network eno1": Reason.IO_ERROR,
        "network eth0": Reason.IO_ERROR,
        "network bond0": Reason.MALFORMED,
        "network ibp24s0": Reason.MALFORMED,
    }
    assert all(fault.part.split()[1] in fault.detail for fault in result.faults)
    assert by_name(result, RECEIVE_BYTES)["eno1"] == 99182736455
    assert set(by_name(result, CARRIER_CHANGES)) == {"eno2", "ens3f0np0", "usb0", "eth0"}


def test_nothing_can_be_read(bench: Interfaces) -> None:
    """When every interface fails, the attempt fails."""
    bench.reader.refused = {f"{name}/operstate": errno.EACCES for name in (*WITH_HARDWARE, "bond0")}
    result = bench.collect()
    assert result.outcome is CollectionOutcome.ERROR
    assert result.reason is Reason.PERMISSION_DENIED
    assert len(by_name(result, RECEIVE_BYTES)) == 7
    assert not by_name(result, UP)


def test_malformed_traffic(bench: Interfaces) -> None:
    """A line of /proc/net/dev that is too short is a fault of its interface."""
    place = bench.root / "proc/net/dev"
    lines = place.read_text().splitlines()
    place.write_text(
        "\n".join(line[:40] if "eno1:" in line or "docker0:" in line else line for line in lines)
        + "\n"
    )
    result = bench.collect()
    assert reasons(result) == {"network eno1": Reason.MALFORMED}
    assert "eno1" not in by_name(result, RECEIVE_BYTES)
    assert len(by_name(result, RECEIVE_BYTES)) == 6


def test_interface_vanishes_and_returns(bench: Interfaces) -> None:
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
    assert "ibp24s0" not in by_name(result, RECEIVE_BYTES)
    link.symlink_to(target)
    bench.write("ibp24s0/speed", "200000")
    proc.write_text(text)
    assert by_name(bench.collect(), SPEED)["ibp24s0"] == 25e9


def test_against_ip() -> None:
    """Traffic, MTU and state of this machine are what `ip` gets just before and after."""
    host = Host()
    if Network.absent(NetworkOptions(), host) is not None or shutil.which("ip") is None:
        pytest.skip("no interface with hardware, or no ip")
    before, result, after = _ip(), Bench("network").collect(), _ip()
    assert result.outcome is CollectionOutcome.OK
    assert by_name(result, MTU)
    for name, mtu in by_name(result, MTU).items():
        assert mtu == after[name]["mtu"]
        for metric, path in ((RECEIVE_BYTES, "rx bytes"), (TRANSMIT_BYTES, "tx bytes")):
            assert (
                int(before[name][path]) <= by_name(result, metric)[name] <= int(after[name][path])
            )
        state = before[name]["operstate"]
        if state == after[name]["operstate"] and state != "UNKNOWN":
            assert by_name(result, UP)[name] == (state == "UP")


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
    [(25000, 3.125e9), (10, 1.25e6), (1, 125e3), (0, None), (-1, None)],
)
def test_speed(megabits: int, speed: float | None) -> None:
    """Speed is in bytes per second; -1 and 0 mean unknown."""
    assert speed_of(megabits) == speed
