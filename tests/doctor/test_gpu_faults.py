"""Faults of GPUs, NVML and the links of GPUs are found on simulated hardware, and pass once
mended.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dshealthd.doctor import status_document
from tests.doctor.machine import Machine, hurried


def test_each_fault_is_found_and_passes_once_mended(make_machine: Callable[..., Machine]) -> None:
    """Six GPUs with a fault each are all named, with slug and remedy; mended, nothing is left."""
    machine = make_machine()
    gpus = machine.simulator
    faults = (
        (0, "ecc_volatile_uncorrected", 3),
        (1, "remapped_pending", 1),
        (2, "pcie_width", 4),
        (3, "temperature", 97),
        (4, "remapped_failure", 1),
    )
    for gpu, key, value in faults:
        gpus.set(gpu, key, value)
    gpus.fault("fail", 15, gpu=5)
    answer = machine.examine()
    assert answer.status == 2
    found = answer.found
    lost = "nccl-all-reduce-failed"
    assert found["gpu-memory", "gpu 0"] == (lost, "critical")
    assert found["gpu-memory", "gpu 1"] == (lost, "warning")
    assert found["pcie", "gpu 2"] == ("cpu-offload-slow", "warning")
    assert found["gpu-throttling", "gpu 3"] == ("gpu-throttled", "warning")
    assert found["gpu-memory", "gpu 4"] == (lost, "critical")
    assert found["gpus", "gpu 5"] == ("gpu-lost", "critical")
    for check in answer.node["checks"]:
        assert all(one["remedy"] for one in check["results"] if one["outcome"] != "ok"), check
    width = next(one for one in answer.results("pcie") if one["component"] == "gpu 2")
    assert (width["value"], width["limit"]) == ("4", "16")
    assert width["source"] == "dshealthd_pcie_link_width_max"

    gpus.clear_faults()
    for gpu, key, _ in faults:
        gpus.unset(gpu, key)
    mended = machine.examine()
    assert (mended.found, mended.status) == ({}, 0)


@pytest.mark.parametrize(
    ("fault", "value", "function", "gpus", "reason"),
    [
        ("hang", 1, None, range(1), "hangs"),
        ("hang", 1, "nvmlDeviceGetTemperature*", range(8), "hangs"),
        ("fail", 18, "init", range(1), "version mismatch"),
    ],
    ids=["hung", "all GPUs hung", "version"],
)
def test_broken_nvml(
    make_machine: Callable[..., Machine],
    fault: str,
    value: int,
    function: str | None,
    gpus: range,
    reason: str,
) -> None:
    """NVML that hangs or is of another version is critical, and what it would have told unknown."""
    machine = make_machine()
    for gpu in gpus:
        machine.simulator.fault(fault, value, function=function, gpu=gpu if len(gpus) > 1 else None)
    with pytest.MonkeyPatch.context() as patch:
        hurried(patch)
        answer = machine.examine()
    assert answer.status == 2
    worst = answer.results("nvml")[0]
    assert worst["outcome"] == "critical"
    assert reason in worst["text"].lower().replace("_", " ")
    assert worst["remedy"]
    assert answer.results("gpus")[0]["outcome"] in {"unknown", "critical"}
    assert answer.results("gpu-throttling")[0]["outcome"] == "unknown"
    machine.simulator.clear_faults()
    mended = machine.examine()
    assert (mended.status, mended.found) == (0, {})


def test_a_look_has_its_deadline(
    make_machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has not answered at the deadline of the whole look is unknown; the rest is told."""
    machine = make_machine()
    machine.simulator.fault("hang")
    monkeypatch.setattr(status_document, "COLLECT_DEADLINE", 20.0)
    answer = machine.examine()  # the source itself has longer
    assert answer.results("nvml")[0]["outcome"] == "unknown"
    assert "no answer" in answer.results("nvml")[0]["text"]
    assert answer.results("shared-memory")[0]["outcome"] == "ok"


def test_gpus_that_are_released(make_machine: Callable[..., Machine]) -> None:
    """GPUs that the agent leaves alone, by file or configuration, are found."""
    machine = make_machine()
    file = machine.directory / "root/run/dshealthd/release-gpus"
    file.parent.mkdir(parents=True)
    file.touch()
    machine.config.write_text(f'[path]\nrootfs = "{file.parents[2]}"\n', encoding="utf-8")
    answer = machine.examine()
    assert answer.found["gpu-metrics", "released GPUs"] == ("gpu-metrics-gone", "warning")
    assert "remove `/run/dshealthd/release-gpus`" in answer.results("gpu-metrics")[0]["remedy"]
    file.unlink()
    machine.config.write_text("", encoding="utf-8")
    assert machine.examine().found == {}
    machine.config.write_text("[collectors.gpu]\nenabled = false\n", encoding="utf-8")
    answer = machine.examine()
    assert answer.found["gpu-metrics", ""] == ("gpu-metrics-gone", "warning")
    assert "disables the GPU collectors" in answer.results("gpu-metrics")[0]["remedy"]
    machine.config.write_text("[collectors.gpu]\nenabled = true\n", encoding="utf-8")
    assert machine.examine().found == {}


def test_gpus_of_another_container(make_machine: Callable[..., Machine]) -> None:
    """In a container with two of a node's eight GPUs these alone are judged; one of which NVML does
    not list is lost, as is one that the driver does not have.
    """
    machine = make_machine()
    machine.simulator.order(0, 1)
    devices = sorted((machine.sys / "bus/pci/devices").iterdir())
    for device in devices:
        (device.resolve() / "driver").symlink_to("../../../bus/pci/drivers/nvidia")
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (machine.dev / name).touch()
    answer = machine.examine()
    assert (answer.status, answer.found) == (0, {})
    (machine.dev / "nvidia2").touch()
    answer = machine.examine()
    assert answer.found["gpus", "GPUs"] == ("gpu-lost", "critical")
    assert answer.results("gpus")[0]["value"] == "1"
    (machine.dev / "nvidia2").unlink()
    (devices[7].resolve() / "driver").unlink()
    assert machine.examine().results("gpus")[0]["value"] == "1"
