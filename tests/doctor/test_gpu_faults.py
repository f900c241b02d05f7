"""Faults of GPUs, NVML and the links of GPUs are found on simulated hardware, and pass once mended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.doctor.machine import Machine


def test_each_fault_is_found_and_passes_once_mended(make_machine: Callable[..., Machine]) -> None:
    """Six GPUs with a fault each, one that is no longer in NVML: all named, with slug and remedy;
    mended, nothing is left.
    """
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
    assert mended.found == {}
    assert mended.status == 0


@pytest.mark.parametrize(
    ("fault", "value", "function", "gpus", "reason"),
    [
        ("hang", 1, None, range(1), "hangs"),
        ("hang", 1, "nvmlDeviceGetTemperature*", range(8), ""),
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
    """NVML that hangs, or is of another version than the driver, is critical within the deadlines as
    they are; what it would have told is unknown, not ok. Where every GPU hangs for itself there may
    be no time left to know it.
    """
    machine = make_machine()
    for gpu in gpus:
        machine.simulator.fault(fault, value, function=function, gpu=gpu if len(gpus) > 1 else None)
    started = time.monotonic()
    answer = machine.examine()
    assert time.monotonic() - started < 30  # its own bound is 10 s, on a machine with time
    assert answer.status == 2 if reason else answer.status in {2, 3}
    worst = answer.results("nvml")[0]
    assert worst["outcome"] in ({"critical"} if reason else {"critical", "unknown"})
    assert reason in worst["text"].lower().replace("_", " ")
    assert worst["remedy"]
    assert answer.results("gpus")[0]["outcome"] in {"unknown", "critical"}
    assert answer.results("gpu-throttling")[0]["outcome"] == "unknown"
