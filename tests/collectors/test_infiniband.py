"""Ports of five adapters as in /sys: InfiniBand, RoCE, one down, one without counters."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench.processes import node_exporter
from dshealthd.collectors.infiniband import (
    CONGESTION,
    ERRORS,
    FLAPS,
    PHYSICAL_STATE,
    PORT_INFO,
    RATE,
    RECEIVE_BYTES,
    STATE,
    TEMPERATURE,
    TRANSMIT_BYTES,
    UP,
    Infiniband,
    InfinibandOptions,
)
from dshealthd.core.collector import Reason
from dshealthd.core.result import CollectionOutcome, CollectionResult
from dshealthd.linux.infiniband import PortHistory, parse_rate, read_attribute
from tests.agents import Scrape
from tests.collectors.bench import Bench, Reader, copied, host, reasons, values, write

DEVICES = {"irdma0", "mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"}
PORT_1 = "class/infiniband/mlx5_1/ports/1"


class Adapters(Bench):
    """A collector on a copy of the fixture that a test can change."""

    def __init__(self, base: Path, **options: Any) -> None:
        self.reads, self.sysfs = Reader(read_attribute), base / "sys"
        super().__init__("infiniband", base, self.reads, **options)

    def write(self, path: str, text: str) -> None:
        """Change a file."""
        write(self.sysfs, {path: text})

    def remove(self, device: str) -> Path:
        """Take a device away; returns where its link led."""
        link = self.sysfs / "class/infiniband" / device
        place = link.resolve()
        link.unlink()
        return place

    def register(self, device: str, place: Path) -> None:
        """Bring a device back as the kernel does: as new directories."""
        fresh = place.with_name("fresh")
        shutil.copytree(place, fresh, symlinks=True)
        shutil.rmtree(place)
        fresh.rename(place)
        (self.sysfs / "class/infiniband" / device).symlink_to(place)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a copy of the fixture."""
    return copied("infiniband", tmp_path)


@pytest.fixture
def bench(base: Path) -> Adapters:
    """Return a collector on a copy of the fixture."""
    return Adapters(base)


def up(result: CollectionResult) -> Mapping[str, float]:
    """Return `port_up` by device; every adapter of the fixture has one port."""
    return {device: value for (device, _port), value in values(result, UP).items()}


def test_as_node_exporter_reads_it(bench: Adapters) -> None:
    """Where both have a value, node_exporter reports the same of the same tree."""
    if shutil.which("prometheus-node-exporter") is None:
        pytest.skip("node_exporter is not installed")
    ours = {
        "port_data_transmitted_bytes_total": (TRANSMIT_BYTES, ()),
        "port_data_received_bytes_total": (RECEIVE_BYTES, ()),
        "rate_bytes_per_second": (RATE, ()),
        "symbol_error_total": (ERRORS, ("symbol_error",)),
        "link_downed_total": (ERRORS, ("link_downed",)),
        "port_errors_received_total": (ERRORS, ("port_rcv_errors",)),
        "local_link_integrity_errors_total": (ERRORS, ("local_link_integrity_errors",)),
    }
    flags = f"--path.sysfs={bench.sysfs}", "--collector.disable-defaults", "--collector.infiniband"
    with node_exporter(*flags) as server:
        theirs = Scrape(server.scrape().decode(), 0.0)
    result = bench.collect()
    compared = 0
    for name, (metric, more) in ours.items():
        for labels, value in values(result, metric).items():
            if labels[2:] == more and labels[0] != "irdma0":  # where it makes zeros of "N/A"
                device, port, *_ = labels
                assert theirs.value(f"node_infiniband_{name}", device=device, port=port) == value
                compared += 1
    assert compared == 4 * len(ours) - 1  # the rate of the port that is down has no value here


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, 524])
def test_refused_files_are_asked_for_once(bench: Adapters, number: int) -> None:
    """A counter or sensor that the driver refuses is no fault, has no series, and is not read again
    before the device is registered anew, which may support it then.
    """
    bench.reads.refused = {"/out_of_buffer": number, "/temp2_input": number}
    for _ in range(3):
        result = bench.collect()
        assert not result.faults
        assert ("mlx5_0", "1", "out_of_buffer") not in values(result, ERRORS)
        assert ("mlx5_0", "module0") not in values(result, TEMPERATURE)
        assert ("mlx5_0", "asic") in values(result, TEMPERATURE)
    assert bench.reads.count("/out_of_buffer") == 4  # the devices that have it
    assert bench.reads.count("/temp2_input") == 1
    bench.collect(3600)
    assert bench.reads.count("/out_of_buffer") == 4
    bench.reads.refused = {}
    bench.register("mlx5_1", bench.remove("mlx5_1"))
    result = bench.collect()
    assert values(result, ERRORS)["mlx5_1", "1", "out_of_buffer"] == 0
    assert ("mlx5_0", "1", "out_of_buffer") not in values(result, ERRORS)


def test_not_available_text_is_no_number(bench: Adapters) -> None:
    """Counters of "N/A (no PMA)" are no zeros or faults and read once; the port is there."""
    for _ in range(2):
        result = bench.collect()
        assert not result.faults
        assert up(result)["irdma0"] == 1
        assert not any(
            labels[0] == "irdma0"
            for metric in (ERRORS, TRANSMIT_BYTES)
            for labels in values(result, metric)
        )
    assert bench.reads.count("irdma0/ports/1/counters/symbol_error") == 1


def test_odd_device_leaves_the_others_alone(bench: Adapters) -> None:
    """A device whose files fail is one fault for its counters and one for its state."""
    bench.reads.refused = {
        f"mlx5_1/ports/1/{file}": errno.EIO
        for file in ("state", "counters/symbol_error", "counters/link_downed")
    }
    result = bench.collect()
    assert result.outcome is CollectionOutcome.OK
    assert up(result) == {"irdma0": 1, "mlx5_0": 1, "mlx5_2": 1, "mlx5_3": 0}
    assert [(fault.part, fault.reason) for fault in result.faults] == [
        ("infiniband mlx5_1 port 1", Reason.IO_ERROR)
    ] * 2
    assert result.faults[0].detail.endswith("and 1 more file")
    assert values(result, ERRORS)["mlx5_1", "1", "packet_seq_err"] == 29
    bench.reads.refused = {}
    assert not bench.collect().faults


def test_malformed_files(bench: Adapters) -> None:
    """A number, state or rate that cannot be read is a fault that names the file."""
    bench.reads.answers = {
        "mlx5_0/ports/1/counters/symbol_error": b"many\n",
        "mlx5_1/ports/1/state": b"ACTIVE\n",
        "mlx5_2/ports/1/rate": b"100 furlongs/fortnight\n",
    }
    result = bench.collect()
    assert reasons(result) == {
        f"infiniband mlx5_{number} port 1": Reason.MALFORMED for number in range(3)
    }
    assert "symbol_error" in result.faults[0].detail
    assert ("mlx5_0", "1", "symbol_error") not in values(result, ERRORS)
    assert "mlx5_1" not in up(result)
    assert up(result)["mlx5_2"] == 1
    assert ("mlx5_2", "1") not in values(result, RATE)


def test_nothing_can_be_read(bench: Adapters) -> None:
    """When no port of any device can be read, the attempt fails."""
    bench.reads.refused = {"/state": errno.ENODEV}
    result = bench.collect()
    assert result.outcome is CollectionOutcome.ERROR
    assert result.reason is Reason.NOT_FOUND
    assert not up(result)


def test_unknown_states(bench: Adapters) -> None:
    """A state that a later kernel may know is unknown, and the port is not up."""
    bench.write(f"{PORT_1}/phys_state", "0: <unknown>")
    bench.write("class/infiniband/mlx5_0/ports/1/state", "9: RESTING")
    result = bench.collect()
    assert up(result)["mlx5_0"] == up(result)["mlx5_1"] == 0
    assert values(result, STATE)["mlx5_0", "1", "unknown"] == 1


@pytest.mark.parametrize("text", [
    "0: NOP", "1: DOWN", "2: INIT", "3: ARMED", "4: ACTIVE", "5: ACTIVE_DEFER",
    "1: Sleep", "2: Polling", "3: Disabled", "5: LinkUp", "6: LinkErrorRecovery", "7: Phy Test",
])  # fmt: skip
def test_states_have_the_kernels_names(bench: Adapters, text: str) -> None:
    """A state is shown as the kernel's own text has it (drivers/infiniband/core/sysfs.c)."""
    file, metric = ("state", STATE) if text.isupper() else ("phys_state", PHYSICAL_STATE)
    bench.write(f"{PORT_1}/{file}", text)
    name = re.sub(r" |(?<=[a-z])(?=[A-Z])", "_", text[3:]).lower()
    assert values(bench.collect(), metric)["mlx5_1", "1", name] == 1


@pytest.mark.parametrize(("samples", "flaps"), [
    pytest.param([(True, 3), (True, 3)], 0, id="steady"),
    pytest.param([(False, 3), (True, 3)], 0, id="comes up"),
    pytest.param([(True, 3), (True, 4)], 1, id="down and up again between two samples"),
    pytest.param([(True, 3), (True, 6)], 3, id="three times between two samples"),
    pytest.param([(True, 3), (False, 4), (True, 4)], 1, id="seen and counted in the same sample"),
    pytest.param([(True, 3), (False, 3), (False, 4), (True, 4)], 1, id="seen before it is counted"),
    pytest.param([(True, 3), (False, 5), (True, 5)], 2, id="seen once, counted twice"),
    pytest.param([(True, 255), (False, 255), (True, 255)], 1, id="counter at its limit"),
    pytest.param([(True, None), (False, None), (True, None)], 1, id="no counter"),
    pytest.param([(True, 3), (False, 3), (True, 3), (True, 4)], 2, id=("orderly shutdown, then a "
                                                                       "flap")),
    pytest.param([(True, 9), (True, 0), (True, 1)], 1, id="counter cleared"),
    pytest.param([(True, 9), (True, 2)], 2, id="counter cleared and grown"),
])  # fmt: skip
def test_flaps(samples: list[tuple[bool, int | None]], flaps: int) -> None:
    """Each time a port leaves ACTIVE counts once, by its state, `link_downed`, or both."""
    history = PortHistory()
    for active, downed in samples:
        history.observe(active=active, downed=downed)
    assert history.flaps == flaps


def test_flaps_are_counted_from_the_files(bench: Adapters) -> None:
    """The state and `link_downed` of a port are what its flaps are counted from."""
    assert values(bench.collect(), FLAPS)["mlx5_1", "1"] == 0
    bench.write(f"{PORT_1}/state", "1: DOWN")
    bench.write(f"{PORT_1}/counters/link_downed", "4")
    result = bench.collect()
    assert up(result)["mlx5_1"] == 0
    assert ("mlx5_1", "1") not in values(result, RATE)
    bench.write(f"{PORT_1}/state", "4: ACTIVE")
    bench.write(f"{PORT_1}/counters/link_downed", "6")
    assert values(bench.collect(), FLAPS) == {
        (device, "1"): 3 * (device == "mlx5_1") for device in DEVICES
    }


def test_device_vanishes_and_returns(bench: Adapters) -> None:
    """A device that is gone has port_up 0, state gone and one flap more, and nothing else."""
    before = bench.collect()
    place = bench.remove("mlx5_1")
    for _ in range(3):
        gone = bench.collect()
        assert gone.outcome is CollectionOutcome.OK
        assert not gone.faults
        assert up(gone) == {**up(before), "mlx5_1": 0}
        ours = {
            (sample.metric, sample.labels[2:]): sample.value
            for sample in gone.samples
            if sample.labels[0] == "mlx5_1"
        }
        assert ours == {(UP, ()): 0, (STATE, ("gone",)): 1, (FLAPS, ()): 1}
    (place / "ports/1/counters/link_downed").write_text("0\n")
    bench.register("mlx5_1", place)
    after = bench.collect()
    assert up(after) == up(before)
    assert values(after, FLAPS)["mlx5_1", "1"] == 1
    assert {sample[:2] for sample in after.samples} == {sample[:2] for sample in before.samples}


def test_port_vanishes(bench: Adapters) -> None:
    """A device that comes back with fewer ports has the missing one down."""
    shutil.copytree(bench.sysfs / PORT_1, bench.sysfs / PORT_1.replace("ports/1", "ports/2"))
    shown = values(bench.collect(), UP)
    assert [labels for labels in shown if "mlx5_1" in labels] == [("mlx5_1", "1"), ("mlx5_1", "2")]
    assert shown["mlx5_1", "2"] == 1
    place = bench.remove("mlx5_1")
    shutil.rmtree(place / "ports/2")
    bench.register("mlx5_1", place)
    result = bench.collect()
    assert values(result, UP)["mlx5_1", "1"] == 1
    assert values(result, UP)["mlx5_1", "2"] == 0


@pytest.mark.parametrize("file", ["physfn", "sfnum"])
def test_virtual_function(bench: Adapters, file: str) -> None:
    """A virtual or scalable function that its host sees has traffic, and none of it is down when it
    goes.
    """
    (bench.sysfs / f"class/infiniband/mlx5_1/device/{file}").touch()
    before = bench.collect()
    assert before.outcome is CollectionOutcome.OK
    assert ("mlx5_1", "1") in values(before, TRANSMIT_BYTES)
    assert set(up(before)) == DEVICES - {"mlx5_1"}
    bench.remove("mlx5_1")
    after = bench.collect()
    assert up(after) == up(before)
    assert "mlx5_1" not in {sample.labels[0] for sample in after.samples}


def test_device_that_is_renamed(bench: Adapters) -> None:
    """A device that has another name now, as udev or a bond gives it, is not gone."""
    bench.collect()
    place = bench.remove("mlx5_1")
    (bench.sysfs / "class/infiniband/ibp59s0").symlink_to(place.rename(place.with_name("ibp59s0")))
    for _ in range(2):
        result = bench.collect()
        assert not result.faults
        assert up(result) == dict.fromkeys(DEVICES - {"mlx5_1", "mlx5_3"} | {"ibp59s0"}, 1) | {
            "mlx5_3": 0
        }
        assert "mlx5_1" not in {sample.labels[0] for sample in result.samples}


@pytest.mark.parametrize("started", [True, False])
def test_device_of_another_namespace(bench: Adapters, *, started: bool) -> None:
    """A device that a container has to itself is neither gone nor down, also for an agent that
    starts meanwhile; a virtual function does not count.
    """
    if started:
        bench.collect()
    place = bench.remove("mlx5_1")
    shutil.move(place, bench.sysfs / "elsewhere")
    for number, name in enumerate(("mlx5_0", "mlx5_1", "mlx5_9")):
        verbs = bench.sysfs / f"class/infiniband_verbs/uverbs{number}"
        write(verbs, {"ibdev": name, "device/vendor": "0x15b3"})
    (verbs / "device/physfn").symlink_to("../0000:18:00.0")
    for _ in range(2):
        result = bench.collect()
        assert not result.faults
        assert set(up(result)) == DEVICES - {"mlx5_1"}
        ours = [sample for sample in result.samples if sample.labels[0] == "mlx5_1"]
        assert [sample[:2] for sample in ours] == [(STATE, ("mlx5_1", "1", "elsewhere"))]
        assert "mlx5_9" not in {sample.labels[0] for sample in result.samples}
    shutil.move(bench.sysfs / "elsewhere", place)
    (bench.sysfs / "class/infiniband/mlx5_1").symlink_to(place)
    result = bench.collect()
    assert up(result)["mlx5_1"] == 1
    assert values(result, FLAPS)["mlx5_1", "1"] == 0


def test_all_devices_of_other_namespaces(bench: Adapters) -> None:
    """They are there, as in a container's view of its host."""
    for name in DEVICES:
        bench.remove(name)
    assert bench.collect().outcome is CollectionOutcome.NOT_AVAILABLE
    write(bench.sysfs / "class/infiniband_verbs/uverbs0", {"ibdev": "mlx5_0"})
    result = bench.collect()
    assert result.outcome is CollectionOutcome.OK
    assert values(result, STATE) == {("mlx5_0", "1", "elsewhere"): 1}


def test_devices_that_become_a_bond(bench: Adapters) -> None:
    """Of a bond's ports, the device of the first is named after the bond, and that of the other
    ends: neither is down.
    """
    bench.collect()
    bond = bench.sysfs / "class/net/bond0"
    bond.mkdir(parents=True)
    for name in ("mlx5_1", "mlx5_2"):
        net = (bench.sysfs / f"class/infiniband/{name}/device/net").resolve()
        for interface in net.iterdir():
            (interface / "master").symlink_to(bond)
    other, first = bench.remove("mlx5_1"), bench.remove("mlx5_2")
    shutil.rmtree(other)
    write(first, {"ports/1/gid_attrs/ndevs/0": "bond0"})
    (bench.sysfs / "class/infiniband/mlx5_bond_0").symlink_to(
        first.rename(first.with_name("mlx5_bond_0"))
    )
    result = bench.collect()
    assert up(result) == {"irdma0": 1, "mlx5_0": 1, "mlx5_3": 0, "mlx5_bond_0": 1}
    assert values(result, STATE)["mlx5_1", "1", "elsewhere"] == 1
    (bench.sysfs / "class/infiniband/mlx5_bond_0").unlink()
    assert up(bench.collect())["mlx5_1"] == 0


def test_driver_unloaded(bench: Adapters) -> None:
    """With all devices gone, and the directory too, every port that was seen is down."""
    bench.collect()
    shutil.rmtree(bench.sysfs / "class/infiniband")
    result = bench.collect()
    assert result.outcome is CollectionOutcome.OK
    assert up(result) == dict.fromkeys(DEVICES, 0)


def test_machine_without_infiniband(tmp_path: Path) -> None:
    """No directory: absent. An empty one in which no device was ever seen: not available."""
    assert "does not exist" in str(Infiniband.absent(InfinibandOptions(), host(tmp_path)))
    (tmp_path / "sys/class/infiniband").mkdir(parents=True)
    assert Infiniband.absent(InfinibandOptions(), host(tmp_path)) is None
    assert Adapters(tmp_path).collect().outcome is CollectionOutcome.NOT_AVAILABLE


def test_excluded_devices(base: Path) -> None:
    """A device that the options exclude is not even approached."""
    bench = Adapters(base, exclude=("irdma*", "mlx5_3"))
    assert set(up(bench.collect())) == {"mlx5_0", "mlx5_1", "mlx5_2"}
    assert bench.entered == [f"infiniband mlx5_{number}" for number in range(3)]
    assert not bench.reads.count("irdma0/fw_ver")


def test_quarantined_device_is_not_touched(bench: Adapters) -> None:
    """A device under quarantine gives its fault and is not read; it may still vanish."""
    bench.hung = {"infiniband mlx5_1": Reason.STUCK}
    result = bench.collect()
    assert result.outcome is CollectionOutcome.OK
    assert reasons(result) == bench.hung
    assert set(up(result)) == DEVICES - {"mlx5_1"}
    assert not any("mlx5_1/" in place for place in bench.reads.seen)
    bench.remove("mlx5_1")
    assert up(bench.collect())["mlx5_1"] == 0


def test_description_is_refreshed(bench: Adapters) -> None:
    """An interface that was renamed has its new name after five minutes, and no read before."""
    bench.collect()
    net = (bench.sysfs / "class/infiniband/mlx5_0/device/net").resolve()
    (net / "ibp24s0").rename(net / "fabric0")
    reads = bench.reads.count("/fw_ver")
    bench.collect(299)
    assert bench.reads.count("/fw_ver") == reads
    assert ("mlx5_0", "1", "fabric0", "InfiniBand") in values(bench.collect(1), PORT_INFO)


def test_two_interfaces_of_one_number(bench: Adapters) -> None:
    """As of a virtual function's representor: the one that the port's GIDs name, else neither."""
    for device in ("mlx5_0", "mlx5_2"):
        net = (bench.sysfs / f"class/infiniband/{device}/device/net").resolve()
        write(net / "pf0vf0", {"dev_port": "0"})
    found = {labels[0]: labels[2] for labels in values(bench.collect(), PORT_INFO)}
    assert (found["mlx5_0"], found["mlx5_2"]) == ("", "ens3f0np0")


def counting(base: Path, counts: Mapping[str, int]) -> Adapters:
    """Return a collector of an adapter that has these files in hw_counters alone."""
    port = base / "sys/class/infiniband/rdma0/ports/1"
    write(port, {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "100 Gb/sec (4X EDR)"})
    write(port / "hw_counters", {name: str(count) for name, count in counts.items()})
    return Adapters(base)


@pytest.mark.parametrize(("others", "errors", "congestion"), [
    # AWS EFA
    ({"tx_bytes": 4300, "rx_bytes": 5000, "tx_pkts": 4}, {"rx_drops": 7}, {}),
    # Broadcom, whose "recoverable errors" are broadcasts
    (
        {"tx_bytes": 4300, "rx_bytes": 5000, "recoverable_errors": 6},
        {"to_retransmits": 7, "rx_roce_discards": 8}, {"rx_cnp_pkts": 9},
    ),
    # Intel's E810, whose traffic is in files of IPv4 and IPv6
    (
        {"ip4OutOctets": 4000, "ip6OutOctets": 300, "ip4InOctets": 5000, "iwInRdmaReads": 9},
        {"ip4InDiscards": 7}, {"cnpSent": 8},
    ),
])  # fmt: skip
def test_counters_of_other_drivers(
    tmp_path: Path, others: dict[str, int], errors: dict[str, int], congestion: dict[str, int]
) -> None:
    """Some adapters have their traffic, in bytes, and their errors in hw_counters alone."""
    result = counting(tmp_path, others | errors | congestion).collect()
    assert not result.faults
    assert values(result, TRANSMIT_BYTES) == {("rdma0", "1"): 4300}
    assert values(result, RECEIVE_BYTES) == {("rdma0", "1"): 5000}
    for metric, found in ((ERRORS, errors), (CONGESTION, congestion)):
        assert values(result, metric) == {("rdma0", "1", name): n for name, n in found.items()}


def test_a_part_of_the_traffic_is_not_the_traffic(tmp_path: Path) -> None:
    """It is unknown while one of its files is: all bits set mean that."""
    bench = counting(tmp_path, {"ip4OutOctets": 4000, "ip6OutOctets": (1 << 64) - 1})
    assert values(bench.collect(), TRANSMIT_BYTES) == {}


def test_holds_no_file_open(bench: Adapters) -> None:
    """Between two sweeps nothing of the driver is held, so that it can be unloaded."""
    before = set(os.listdir("/proc/self/fd"))
    bench.collect()
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("text", "gigabits"), [
    (b"400 Gb/sec (4X NDR)\n", 400),
    (b"2.5 Gb/sec (1X SDR)\n", 2.5),
    (b"800 Gb/sec (4X XDR)", 800),
    (b"25 Gb/sec", 25),
])  # fmt: skip
def test_rate(text: bytes, gigabits: float) -> None:
    """A rate is in bytes per second, whatever the width and the generation in brackets."""
    assert parse_rate(text) == gigabits * 1.25e8
