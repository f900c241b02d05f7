"""What the simulated NVML shows to the genuine pynvml, which runs in processes of its own."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from tests.nvml.client import Client
from tests.nvml.simulator import Simulator

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif(shutil.which(os.environ.get("CC", "gcc")) is None, reason="no C compiler"),
    pytest.mark.skipif(sys.platform != "linux", reason="NVML is simulated for Linux only"),
]


@pytest.fixture
def simulator(tmp_path: Path) -> Simulator:
    """Eight H100."""
    return Simulator(tmp_path / "nvml")


@pytest.fixture
def client(simulator: Simulator) -> Iterator[Client]:
    """A process that has initialised NVML."""
    with Client(simulator) as client:
        yield client


TEMPERATURE = "n.nvmlDeviceGetTemperature(h({}), 0)"


def test_values_differ_between_gpus(client: Client, simulator: Simulator) -> None:
    """A swapped index shows: temperature, power, UUID, serial and PCI address differ on all eight."""
    for call in (
        "Temperature(h(i), 0)",
        "PowerUsage(h(i))",
        "UUID(h(i))",
        "Serial(h(i))",
        "PciInfo(h(i)).busId",
        "MinorNumber(h(i))",
    ):
        answers = client.ask(f"[n.nvmlDeviceGet{call} for i in range(n.nvmlDeviceGetCount())]")
        assert len(set(answers)) == 8, call
    assert client.ask("n.nvmlDeviceGetUUID(h(5))") == simulator.value(5, "uuid")


def test_values_change_while_held(client: Client, simulator: Simulator) -> None:
    """A value that is edited is seen by the next call of a process that is already running."""
    for degrees in (61, 62, 63):
        simulator.set(2, "temperature", degrees)
        assert client.ask(TEMPERATURE.format(2)) == degrees
    assert client.ask(TEMPERATURE.format(3)) == 38


def test_lookup_by_identity(client: Client) -> None:
    """UUID, serial and PCI address (long or short domain) lead to the GPU that has them.

    Others are not found.
    """
    for key, call in (
        ("UUID(h(6))", "UUID"),
        ("Serial(h(6))", "Serial"),
        ("PciInfo(h(6)).busId", "PciBusId"),
    ):
        assert (
            client.ask(f"n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleBy{call}(n.nvmlDeviceGet{key}))")
            == 6
        )
    assert client.ask("n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByPciBusId('0000:ba:00.0'))") == 6
    assert client.ask("n.nvmlDeviceGetHandleByUUID('GPU-none')") == "NVMLError_NotFound 6"
    assert client.ask("h(8)") == "NVMLError_InvalidArgument 2"


@pytest.mark.parametrize("profile", ["h100", "a100", "v100", "b200"])
def test_every_getter_answers(simulator: Simulator, profile: str) -> None:
    """Every getter of pynvml gets a value, "not supported" or "function not found", and never
    another answer.
    """
    simulator.set(None, "profile", profile)
    with Client(simulator) as client:
        seen = client.ask("sweep(1)")
    assert set(seen.values()) <= {0, 2, 3, 6, 13, 25}
    assert sum(code == 0 for code in seen.values()) > 60


def test_parts_differ_in_what_they_support(simulator: Simulator) -> None:
    """H100 remaps rows and has a thermal margin, V100 retires pages, B200 has NVLink 5 error rates
    and no replays.
    """
    simulator.set(1, "profile", "v100")
    simulator.set(2, "profile", "b200")
    with Client(simulator) as client:
        assert client.ask("n.nvmlDeviceGetRemappedRows(h(0))") == [0, 0, 0, 0]
        assert client.ask("n.nvmlDeviceGetMarginTemperature(h(0))") == 87 - 35
        assert client.ask("n.nvmlDeviceGetRetiredPages(h(0), 0)") == "NVMLError_NotSupported 3"
        assert client.ask("n.nvmlDeviceGetRemappedRows(h(1))") == "NVMLError_NotSupported 3"
        assert client.ask("len(n.nvmlDeviceGetRetiredPages_v2(h(1), 0))") == 1
        assert client.ask("fields(0, [(220, 0), (161, 0)])") == [[3, 3, 0], [0, 3, 0]]
        assert client.ask("fields(2, [(220, 0), (161, 0)])") == [[0, 3, 0x10F], [3, 3, 0]]


def test_field_values_fail_one_by_one(client: Client, simulator: Simulator) -> None:
    """A batch of fields carries a return code and a type for each.

    Signed limits, one link, all links, unknown ids.
    """
    simulator.set(0, "nvlink7_replay", 5)
    simulator.set(0, "field.142", "1.5")
    simulator.set(0, "field_fail.230", 999)
    answer = client.ask(
        "fields(0, [82, 193, (161, 7), (161, 2**32 - 1), 230, 142, 0, 60, (161, 18)])"
    )
    assert [code for code, *_ in answer] == [0, 0, 0, 0, 999, 0, 2, 3, 2]
    assert answer[0][1:] == [1, 45]
    assert answer[1][1:] == [5, -8]
    assert answer[2][2] == answer[3][2] == 5
    assert answer[5][1:] == [0, 1.5]


def test_memory_errors_add_up(client: Client, simulator: Simulator) -> None:
    """Totals are the sum over locations, the SRAM threshold is a flag, and ECC switched off is "not
    supported".
    """
    simulator.set(4, "ecc_volatile_corrected_dram", 7)
    simulator.set(4, "ecc_volatile_corrected_sram", 3)
    simulator.set(4, "sram_threshold_exceeded", 1)
    assert client.ask("n.nvmlDeviceGetTotalEccErrors(h(4), 0, 0)") == 10
    assert (
        client.ask("n.nvmlDeviceGetMemoryErrorCounter(h(4), 0, 0, n.NVML_MEMORY_LOCATION_SRAM)")
        == 3
    )
    status = client.ask(
        "struct(n.c_nvmlEccSramErrorStatus_v1_t, n.nvmlDeviceGetSramEccErrorStatus, 4)"
    )
    assert status["bThresholdExceeded"] == 1
    assert status["aggregateCor"] == 4
    simulator.set(4, "ecc_mode", 0)
    assert client.ask("n.nvmlDeviceGetTotalEccErrors(h(4), 0, 0)") == "NVMLError_NotSupported 3"


def test_nvlink_is_down(client: Client, simulator: Simulator) -> None:
    """One link can be down while the others of the GPU, and the same link of other GPUs, stay up."""
    simulator.set(3, "nvlink5_state", 0)
    states = client.ask(
        "[[n.nvmlDeviceGetNvLinkState(h(g), l) for l in range(18)] for g in range(8)]"
    )
    assert [(g, link) for g, row in enumerate(states) for link, up in enumerate(row) if not up] == [
        (3, 5)
    ]
    assert (
        client.ask("n.nvmlDeviceGetNvLinkRemotePciInfo(h(3), 5).bus") == "NVMLError_NotSupported 3"
    )
    assert client.ask("n.nvmlDeviceGetNvLinkState(h(0), 18)") == "NVMLError_InvalidArgument 2"
    fabric = client.ask("struct(n.c_nvmlGpuFabricInfo_v3_t, n.nvmlDeviceGetGpuFabricInfoV, 0)")
    assert (fabric["state"], fabric["healthSummary"]) == (3, 1)


def test_mig_and_processes(client: Client, simulator: Simulator) -> None:
    """MIG devices have ids, UUIDs and memory of their own and refuse what belongs to the GPU.

    Na memory becomes None.
    """
    simulator.set(0, "mig_mode", 1)
    simulator.set(0, "mig_devices", 2)
    simulator.set(0, "mig1_memory_used", 77)
    simulator.set(0, "processes", "10:4096:2:0, 11:na:1:0")
    mig = "n.nvmlDeviceGetMigDeviceHandleByIndex(h(0), 1)"
    assert client.ask(
        f"[n.nvmlDeviceGetGpuInstanceId({mig}), n.nvmlDeviceGetMemoryInfo({mig}).used]"
    ) == [2, 77]
    assert client.ask(f"n.nvmlDeviceGetUUID({mig})").startswith("MIG-")
    assert client.ask(f"n.nvmlDeviceGetTemperature({mig}, 0)") == "NVMLError_NotSupported 3"
    assert client.ask("n.nvmlDeviceGetMigDeviceHandleByIndex(h(0), 2)") == "NVMLError_NotFound 6"
    listed = "[(p.pid, p.usedGpuMemory) for p in n.nvmlDeviceGetComputeRunningProcesses({})]"
    assert client.ask(listed.format("h(0)")) == [[10, 4096], [11, None]]
    assert client.ask(listed.format(mig)) == [[10, 4096]]
    assert client.ask(listed.format("h(1)")) == []


def test_sentinels(client: Client, simulator: Simulator) -> None:
    """A value na is all bits one in the width of the answer, nan a double, and neither is mistaken
    for a number nearby.
    """
    for key in ("memory_used", "power_usage", "utilization_gpu"):
        simulator.set(1, key, "na")
    simulator.set(1, "field.82", "nan")
    assert client.ask("n.nvmlDeviceGetMemoryInfo(h(1)).used") == 2**64 - 1
    assert (
        client.ask("[n.nvmlDeviceGetPowerUsage(h(1)), n.nvmlDeviceGetUtilizationRates(h(1)).gpu]")
        == [2**32 - 1] * 2
    )
    assert client.ask("[str(v) for v in fields(1, [82])[0]]") == ["0", "0", "nan"]


def test_energy_advances_unless_frozen(client: Client, simulator: Simulator) -> None:
    """The energy counter grows by power and time, never falls when power does, and stands still
    when frozen.
    """
    energy = "n.nvmlDeviceGetTotalEnergyConsumption(h(0))"
    simulator.set(0, "power_usage", 400_000)
    first = client.ask(energy)
    time.sleep(0.3)
    second = client.ask(energy)
    assert 0.25 * 400_000 < second - first < 20 * 400_000
    simulator.set(0, "power_usage", 0)
    assert client.ask(energy) >= second
    simulator.set(0, "frozen", 1)
    simulator.set(0, "power_usage", 400_000)
    still = client.ask(energy)
    time.sleep(0.1)
    assert client.ask(energy) == still


def test_every_edit_is_seen_at_once(client: Client, simulator: Simulator) -> None:
    """Edits as fast as they come, of one length, never leave the process with an older value."""
    for degrees in range(10, 60):
        simulator.set(1, "temperature", degrees)
        assert client.ask(TEMPERATURE.format(1)) == degrees


def test_reading_while_edited(client: Client, simulator: Simulator) -> None:
    """A reader that runs while the scenario is rewritten sees old or new values, never a
    half-written file.
    """
    stop = threading.Event()

    def edit() -> None:
        while not stop.is_set():
            for watts in (100_000, 200_000):
                simulator.set(None, "power_usage", watts)

    simulator.set(None, "power_usage", 100_000)
    editor = threading.Thread(target=edit)
    editor.start()
    try:
        seen = client.ask("sorted({n.nvmlDeviceGetPowerUsage(h(i % 8)) for i in range(5000)})")
    finally:
        stop.set()
        editor.join(60)
    assert set(seen) <= {100_000, 200_000}


def test_pci_tree_matches(client: Client, simulator: Simulator, tmp_path: Path) -> None:
    """The PCI tree has the addresses and ids that NVML gives, also of GPUs that NVML no longer
    shows, but for the missing.
    """
    simulator.order(0, 1)
    simulator.set(5, "pcie_generation", 1)
    simulator.pci_sysfs(tmp_path, missing={7})
    devices = tmp_path / "bus" / "pci" / "devices"
    found = sorted(devices.iterdir())
    assert len(found) == 7
    bus_id, device_id = client.ask(
        "[(p.busId, p.pciDeviceId) for p in [n.nvmlDeviceGetPciInfo(h(1))]][0]"
    )
    assert found[1].name == bus_id[4:].lower()
    read = {
        name: (found[1] / name).read_text().strip()
        for name in ("vendor", "device", "class", "numa_node")
    }
    assert read == {
        "vendor": "0x10de",
        "device": f"0x{device_id >> 16:04x}",
        "class": "0x030200",
        "numa_node": "0",
    }
    assert (found[5] / "current_link_speed").read_text() == "2.5 GT/s PCIe\n"
    assert (found[5] / "max_link_speed").read_text() == "32.0 GT/s PCIe\n"


def test_a_wrong_key_is_refused(simulator: Simulator) -> None:
    """A misspelt key or fault is an error of the test, not a scenario that silently changes
    nothing.
    """
    simulator.set(3, "nvlink17_state", 0)
    simulator.fault("fail", 3, function="nvmlDeviceGet*")
    for key in ("temprature", "nvlink17_stat", "fails", "gpu3.temperature"):
        with pytest.raises(KeyError, match=key):
            simulator.set(None, key, 1)
    with pytest.raises(KeyError, match="hung"):
        simulator.fault("hung")
