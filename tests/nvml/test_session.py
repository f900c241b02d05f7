"""The NVML session: return codes, GPUs that come and go, frozen readings, what is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from dshealthd.core.collector import Reason
from dshealthd.core.result import CollectionOutcome
from tests.nvml.node import GPU_COLLECTORS, Node, nodes

node = nodes()

REFRESH = 60.0


def others(gpu: int) -> set[str]:
    """Return the indices of the other seven."""
    return {str(index) for index in range(8)} - {str(gpu)}


@pytest.mark.parametrize(("code", "reason"), [(15, Reason.GPU_LOST), (999, Reason.UNKNOWN_ERROR)])
def test_code_of_one_gpu(node: Node, code: int, reason: Reason) -> None:
    """A GPU that fails is down with its UUID and its own reason, in every collector."""
    node.collect()
    node.simulator.fault("fail", code, gpu=3)
    seen = node.collect()
    for name in ("gpu", "ecc", "nvlink", "nvlink_domain", "pcie", "gpu_processes", "mig"):
        assert seen.results[name].outcome is CollectionOutcome.OK
        assert seen.reasons(name) == {"gpu 3": reason}
    assert seen.value("gpu_up", gpu="3", uuid=node.uuid(3)) == 0
    assert seen.value("gpu_fault", gpu="3", uuid=node.uuid(3), reason=str(reason)) == 1
    for metric in (
        "gpu_temperature_celsius",
        "gpu_ecc_errors_total",
        "nvlink_up",
        "pcie_link_width",
        "gpu_compute_processes",
    ):
        assert {labels[0] for labels in seen.values(metric)} == others(3)
    assert seen.value("gpus_visible") == 8
    node.simulator.clear_faults()
    seen = node.collect()
    assert seen.value("gpu_up", gpu="3") == 1
    assert not seen.reasons()
    assert not seen.values("gpu_fault")


def test_reason_of_each_code(node: Node) -> None:
    """Each of NVML's codes that says why has a reason of its own, and all others one together."""
    node.collect()
    for code, reason in {
        4: Reason.PERMISSION_DENIED,
        10: Reason.TIMEOUT,
        14: Reason.IO_ERROR,
        16: Reason.RESET_REQUIRED,
        17: Reason.PERMISSION_DENIED,
        77: Reason.UNKNOWN_ERROR,
    }.items():
        node.simulator.fault("fail", code, gpu=3)
        assert node.collect("gpu").reasons() == {"gpu 3": reason}
        node.simulator.clear_faults()
        assert not node.collect("gpu").reasons()


def test_gpu_lost_from_the_start(node: Node) -> None:
    """A GPU that cannot be opened is down without a UUID, and it is tried again at every sweep."""
    node.simulator.fault("fail", 999, gpu=2)
    seen = node.collect()
    assert seen.value("gpu_up", gpu="2", uuid="") == 0
    assert seen.reasons() == {"gpu 2": Reason.UNKNOWN_ERROR}
    node.simulator.clear_faults()
    assert node.collect().value("gpu_up", gpu="2", uuid=node.uuid(2)) == 1


@pytest.mark.parametrize("code", [9, 12])
def test_no_gpu_on_the_bus(tmp_path: Path, code: int) -> None:
    """Without a GPU on the bus, a missing driver or library is an ordinary absence."""
    with Node(tmp_path, pci=False) as node:
        node.simulator.fault("fail", code, function="init")
        assert node.collect().results["gpu"].outcome is CollectionOutcome.NOT_AVAILABLE


def test_nvml_without_its_gpus(node: Node) -> None:
    """NVML that lists none of the GPUs on the bus is an error."""
    node.simulator.set(None, "order", ",")
    result = node.collect().results["gpu"]
    assert (result.outcome, result.reason) == (CollectionOutcome.ERROR, Reason.NOT_FOUND)


@pytest.mark.parametrize("code", [1, 9])
def test_driver_unloads(node: Node, code: int) -> None:
    """When a call finds the driver gone, NVML is shut down at once, so that no handle stays."""
    node.simulator.watch()
    node.collect()
    node.simulator.fault("fail", code, function="nvmlDeviceGet*")
    result = node.collect().results["ecc"]
    assert (result.outcome, result.reason, result.replace_worker) == (
        CollectionOutcome.ERROR,
        Reason.NOT_LOADED,
        False,
    )
    assert [(event, users) for event, _, users in node.simulator.trace()] == [
        ("init", 1),
        ("shutdown", 0),
    ]
    node.simulator.clear_faults()
    assert len(node.collect().values("gpu_up")) == 8


def test_library_that_does_not_let_go(node: Node) -> None:
    """Where the shut-down fails too, a new process is asked for."""
    node.collect()
    node.simulator.fault("fail", 9)
    result = node.collect("gpu").results["gpu"]
    assert (result.reason, result.replace_worker) == (Reason.NOT_LOADED, True)


def test_handles_are_released_at_the_end(node: Node) -> None:
    """The worker shuts NVML down when it is told to end."""
    node.simulator.watch()
    node.collect()
    assert node.close() == 0
    assert [event for event, _, _ in node.simulator.trace()] == ["init", "shutdown"]


def test_driver_goes_in_the_middle_of_a_sweep(node: Node) -> None:
    """What was read before the driver went is kept; what comes after does not touch it."""
    node.collect()
    node.simulator.fault("fail", 9, function="nvmlDeviceGetSramEccErrorStatus")
    seen = node.collect("gpu", "ecc", "pcie")
    assert seen.results["gpu"].outcome is CollectionOutcome.OK
    assert seen.results["ecc"].reason is Reason.NOT_LOADED
    assert seen.results["pcie"].reason is Reason.NOT_LOADED
    assert not [part for part in seen.approached if part.startswith("pcie")]


def test_count_is_fixed_while_nvml_is_open(node: Node) -> None:
    """NVML counts GPUs when opened, so it is opened anew if the bus has more or one fails."""
    node.simulator.set(None, "order_latched", 1)
    node.simulator.order(0, 1, 2, 3, 4, 5, 6)
    assert node.collect().value("gpus_visible") == 7
    node.simulator.order()
    assert node.collect().value("gpus_visible") == 7
    assert node.collect(advance=REFRESH).value("gpus_visible") == 8


def test_nvml_stays_open_while_all_is_well(node: Node) -> None:
    """A healthy session is opened once, however long it lasts."""
    node.simulator.watch()
    for _ in range(3):
        node.collect("gpu", advance=REFRESH)
    assert [event for event, _, _ in node.simulator.trace()] == ["init"]


def test_frozen_readings(node: Node) -> None:
    """FAULT 15: a GPU whose energy stands still is withheld from every collector after three sweeps
    and ten seconds, until it moves again.
    """
    node.collect()
    node.simulator.set(5, "frozen", 1)
    seen = [node.collect(advance=4) for _ in range(5)]
    assert [round_.value("gpu_up", gpu="5") for round_ in seen] == [1, 1, 0, 0, 0]
    assert {name: seen[-1].reasons(name) for name in seen[-1].results} == {
        name: {"gpu 5": Reason.FROZEN} for name in GPU_COLLECTORS
    }
    assert {labels[0] for labels in seen[-1].values("gpu_power_watts")} == others(5)
    node.simulator.set(5, "frozen", 0)
    assert node.collect().value("gpu_up", gpu="5") == 1


@pytest.mark.parametrize(("seconds", "sweeps"), [(0.9, 11), (20.0, 2)])
def test_few_seconds_or_sweeps_are_not_frozen(node: Node, seconds: float, sweeps: int) -> None:
    """Many sweeps within ten seconds prove nothing; nor do two, however far apart."""
    node.simulator.set(5, "frozen", 1)
    node.collect("gpu")
    seen = [node.collect("gpu", advance=seconds) for _ in range(sweeps + 1)]
    assert [round_.value("gpu_up", gpu="5") for round_ in seen] == [1] * sweeps + [0]


def test_energy_that_is_not_counted(node: Node) -> None:
    """A part that has no energy counter, or one that always says 0, is not taken for frozen."""
    node.simulator.set(0, "energy", "unsupported")
    node.simulator.set(1, "energy", "0")
    node.simulator.set(1, "power_usage", "0")
    seen = [node.collect("gpu", advance=10) for _ in range(5)][-1]
    assert set(seen.values("gpu_up").values()) == {1}
    assert {labels[0] for labels in seen.values("gpu_energy_joules_total")} == others(0)


def test_unsupported_is_not_asked_again(node: Node) -> None:
    """What a GPU does not support is asked once, and again only after the GPUs are listed anew."""
    node.simulator.set(None, "margin_temperature", "unsupported")
    node.simulator.set(None, "sram_threshold_exceeded", "unsupported")
    node.simulator.watch()
    calls = []
    for advance in (5, 5, 5, REFRESH):
        node.collect(advance=advance)
        calls.append(
            [
                node.simulator.calls()[f"nvmlDeviceGet{name}"]
                for name in ("MarginTemperature", "SramEccErrorStatus", "PowerUsage")
            ]
        )
    assert calls == [[8, 8, 8], [8, 8, 16], [8, 8, 24], [16, 16, 32]]


def test_calls_of_a_sweep(node: Node) -> None:
    """What does not change is not asked at every sweep."""
    node.collect()
    node.simulator.watch()
    node.collect()
    calls = node.simulator.calls()
    assert sum(calls.values()) < 8 * 30
    assert "nvmlDeviceGetHandleByIndex_v2" not in calls
    assert calls["nvmlDeviceGetCount_v2"] == 1


@pytest.mark.parametrize(
    ("call", "metric"),
    [("PowerUsage", "gpu_power_watts"), ("TotalEnergyConsumption", "gpu_energy_joules_total")],
)
def test_one_failing_call(node: Node, call: str, metric: str) -> None:
    """One call that fails costs its own sample and is reported; the GPU stays up."""
    node.simulator.fault("fail", 999, gpu=3, function=f"nvmlDeviceGet{call}")
    seen = node.collect()
    assert {labels[0] for labels in seen.values(metric)} == others(3)
    assert seen.value("gpu_temperature_celsius", gpu="3", sensor="core") == 38
    assert seen.value("gpu_up", gpu="3") == 1
    assert seen.value("gpu_fault", gpu="3", reason="unknown_error") == 1
    assert seen.reasons() == {"gpu 3": Reason.UNKNOWN_ERROR}
    assert f"nvmlDeviceGet{call}" in seen.results["gpu"].faults[0].detail


def test_sram_status_needs_root(node: Node) -> None:
    """Where the driver keeps the SRAM status for root, that alone is left out, and without a fault.

    The counts by location come from the calls that everybody may make.
    """
    before = node.collect().values("gpu_ecc_location_errors_total", gpu="3")
    node.simulator.fault("fail", 4, function="nvmlDeviceGetSramEccErrorStatus")
    seen = node.collect(advance=61.0)
    assert set(seen.values("gpu_ecc_location_errors_total", gpu="3")) == set(before)
    assert not seen.values("gpu_sram_threshold_exceeded")
    assert seen.value("gpu_up", gpu="3") == 1
    assert not seen.reasons("ecc")
    assert not seen.reasons("gpu")


def test_failure_names_its_gpu(node: Node) -> None:
    """What fails in any collector of GPUs is told with the GPU, until that collector reads it."""
    node.simulator.set(None, "sram_threshold_exceeded", "unsupported")
    node.simulator.set(None, "nvlink_state", "unsupported")
    for name, function in {
        "ecc": "nvmlDeviceGetMemoryErrorCounter",
        "pcie": "nvmlDeviceGetCurrPcieLinkWidth",
        "mig": "nvmlDeviceGetMigMode",
        "gpu_processes": "nvmlDeviceGetComputeRunningProcesses",
        "nvlink_domain": "nvmlDeviceGetGpuFabricInfoV",
        "nvlink": "nvmlDeviceGetNvLinkState",
    }.items():
        node.simulator.fault("fail", 999, gpu=3, function=function)
        node.collect(*GPU_COLLECTORS, advance=61.0)  # nothing is kept from the turn before
        seen = node.collect(*GPU_COLLECTORS)
        assert [fault.part for fault in seen.results[name].faults] == ["gpu 3"]
        assert seen.value("gpu_up", gpu="3") == 1
        node.simulator.clear_faults()
        node.collect(*GPU_COLLECTORS)
        assert not node.collect(*GPU_COLLECTORS).results[name].faults


def test_last_sign_of_life(node: Node) -> None:
    """Without an energy counter, a GPU is up while one of the calls that every GPU has answers."""
    node.simulator.set(3, "energy", "unsupported")
    for call, up in (("Temperature*", 1), ("PowerUsage", 1), ("PerformanceState", 0)):
        node.simulator.fault("fail", 999, gpu=3, function=f"nvmlDeviceGet{call}")
        assert node.collect("gpu").value("gpu_up", gpu="3", uuid=node.uuid(3)) == up


def test_calls_that_fail_slowly(node: Node) -> None:
    """A call that fails after the driver's timeout is not repeated at every sweep."""
    node.collect()
    for function in ("nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetCurrPcieLinkGeneration"):
        node.simulator.fault("fail", 999, gpu=3, function=function)
        node.simulator.fault("delay", 1.2, gpu=3, function=function)
    node.simulator.watch()
    seen = node.collect("pcie", "ecc", running=True)
    assert seen.reasons("pcie") == {"gpu 3": Reason.UNKNOWN_ERROR}
    assert ("3",) in seen.values("pcie_link_width_max", uuid=node.uuid(3))
    assert ("3",) not in seen.values("pcie_replays_total", uuid=node.uuid(3))
    assert not seen.reasons("ecc")
    seen = node.collect("pcie", running=True)
    assert seen.reasons("pcie") == {"gpu 3": Reason.UNKNOWN_ERROR}
    assert ("3",) in seen.values("pcie_replays_total", uuid=node.uuid(3))
    assert node.simulator.calls()["nvmlDeviceGetCurrPcieLinkWidth"] == 8 + 7


def test_field_that_fails_for_a_while(node: Node) -> None:
    """It is reported at each sweep, its earlier value is not shown meanwhile, and comes back."""
    node.collect()
    node.simulator.set(3, "field_fail.82", 999)
    for _ in range(2):
        seen = node.collect("gpu")
        assert not seen.values("gpu_temperature_celsius", sensor="memory", gpu="3")
        assert seen.reasons() == {"gpu 3": Reason.UNKNOWN_ERROR}
    node.simulator.unset(3, "field_fail.82")
    seen = node.collect("gpu")
    assert list(seen.values("gpu_temperature_celsius", sensor="memory", gpu="3").values()) == [48]
    assert seen.reasons() == {}


@pytest.mark.parametrize(("code", "reasons"), [(999, {"gpu 3": Reason.UNKNOWN_ERROR}), (3, {})])
def test_all_fields_fail_for_a_while(node: Node, code: int, reasons: dict[str, Reason]) -> None:
    """No value of before is shown while the call for them fails or is not supported."""
    node.collect()
    node.simulator.fault("fail", code, function="nvmlDeviceGetFieldValues", gpu=3)
    for _ in range(2):
        seen = node.collect("gpu", "ecc")
        assert not seen.values("gpu_temperature_celsius", sensor="memory", gpu="3")
        assert not seen.values("gpu_remapped_rows", gpu="3")
        assert seen.reasons("gpu") == reasons
    node.simulator.clear_faults()
    node.simulator.set(3, "memory_temperature", 71)
    seen = node.collect("gpu", advance=70.0)  # listed anew, and asked for all again
    assert list(seen.values("gpu_temperature_celsius", sensor="memory", gpu="3").values()) == [71]


def test_quarantined_gpu(node: Node) -> None:
    """A GPU at which a worker hung is down and untouched until the quarantine ends."""
    node.simulator.watch()
    seen = node.collect(blocked={"gpu 3": Reason.TIMEOUT})
    assert seen.reasons("ecc") == {"gpu 3": Reason.TIMEOUT}
    assert seen.value("gpu_up", gpu="3", uuid="") == 0
    assert node.simulator.calls()["nvmlDeviceGetHandleByIndex_v2"] == 7
    node.simulator.fault("fail", 999, function="nvmlDeviceGetUUID", gpu=2)
    for _ in range(3):
        node.collect("gpu", blocked={"gpu 3": Reason.TIMEOUT}, advance=REFRESH)
    assert {event for event, _, _ in node.simulator.trace()} == {"init"}  # nor is NVML opened anew
    node.simulator.clear_faults()
    assert node.collect().value("gpu_up", gpu="3", uuid=node.uuid(3)) == 1


def test_quarantined_nvml(node: Node) -> None:
    """While NVML itself is under quarantine nothing of it is touched."""
    node.simulator.watch()
    result = node.collect(blocked={"nvml": Reason.STUCK}).results["gpu"]
    assert (result.outcome, result.reason) == (CollectionOutcome.ERROR, Reason.STUCK)
    assert not node.simulator.calls()


def test_everything_is_approached(node: Node) -> None:
    """NVML is approached once a sweep, and each GPU by each collector, before they are touched."""
    node.collect()
    seen = node.collect("gpu", "ecc")
    assert seen.approached == [
        "gpu nvml",
        *(f"gpu gpu {index}" for index in range(8)),
        *(
            f"ecc {part}"
            for index in range(8)
            for part in (f"gpu {index}", f"gpu {index}, read by ecc")
        ),
    ]


def test_reading_of_a_collector_is_quarantined(node: Node) -> None:
    """Where `ecc` hung at a GPU, it alone leaves out that GPU, and its calls are not made."""
    node.collect()
    node.simulator.watch()
    seen = node.collect(blocked={"gpu 3, read by ecc": Reason.TIMEOUT})
    assert {name: seen.reasons(name) for name in GPU_COLLECTORS if seen.reasons(name)} == {
        "ecc": {"gpu 3": Reason.TIMEOUT}
    }
    assert node.simulator.calls()["nvmlDeviceGetSramEccErrorStatus"] == 7
    assert seen.value("gpu_up", gpu="3", uuid=node.uuid(3)) == 1
    assert set(seen.values("gpu_ecc_errors_total", type="corrected", counter="volatile")) == {
        (gpu, node.uuid(int(gpu))) for gpu in others(3)
    }


def test_sentinels(node: Node) -> None:
    """FAULT 14: a value that NVML marks as not available is left out, wherever it stands."""
    for key in (
        *("temperature", "memory_temperature", "memory_used", "power_usage", "energy"),
        *("clock_sm", "utilization_gpu", "ecc_volatile_corrected", "sram_volatile_cor"),
        *("remapped_correctable", "pcie_replay", "pcie_width", "nvlink_replay"),
        *("repair_channel_pending", "unrepairable_memory"),
    ):
        node.simulator.set(1, key, "na")
    node.simulator.set(1, "processes", "77:na, 78:4096")
    node.simulator.set(1, "field.230", "nan")
    node.simulator.set(2, "field.230", "inf")
    seen = node.collect()
    all_samples = [sample for result in seen.results.values() for sample in result.samples]
    assert (
        max(sample.value for sample in all_samples if "bytes" not in sample.metric.name) < 2**32 - 1
    )
    assert max(sample.value for sample in all_samples) < 2**60
    for metric, labels in {
        "gpu_temperature_celsius": {},
        "gpu_memory_used_bytes": {},
        "gpu_power_watts": {},
        "gpu_energy_joules_total": {},
        "gpu_clock_hertz": {"domain": "sm"},
        "gpu_utilization_ratio": {},
        "gpu_recovery_action": {},
        "gpu_ecc_errors_total": {"type": "corrected", "counter": "volatile"},
        "gpu_ecc_location_errors_total": {
            "type": "corrected",
            "counter": "volatile",
            "location": "sram",
        },
        "gpu_remapped_rows": {"type": "corrected"},
        "pcie_replays_total": {},
        "pcie_link_width": {},
        "gpu_nvlink_errors_total": {"type": "replay"},
        "gpu_repair_pending": {},
        "gpu_memory_unrepairable": {},
    }.items():
        assert not seen.values(metric, gpu="1", **labels), metric
        assert seen.values(metric, gpu="0", **labels), metric
    assert seen.value("gpu_compute_processes", gpu="1") == 2
    assert not seen.values("gpu_recovery_action", gpu="2")
    assert seen.value("gpu_up", gpu="1") == 1
