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
    ("fault", "value", "function", "reason"),
    [("hang", 1, None, "timeout"), ("fail", 18, "init", "version mismatch")],
)
def test_broken_nvml(
    make_machine: Callable[..., Machine],
    fault: str,
    value: int,
    function: str | None,
    reason: str,
) -> None:
    """NVML that hangs, or is of another version than the driver, is critical and costs no more
    than its deadline; what it would have told is unknown, not ok.
    """
    machine = make_machine()
    machine.config.write_text(
        "".join(
            f'[collectors.{name}]\ndeadline = "500ms"\n'
            for name in ("gpu", "ecc", "nvlink", "pcie", "mig", "gpu_processes")
        )
    )
    machine.simulator.fault(fault, value, function=function)
    started = time.monotonic()
    answer = machine.examine()
    assert time.monotonic() - started < 30  # its own bound is 9 s, on a machine with time
    assert answer.status == 2
    (critical, *_) = answer.results("nvml")
    assert critical["outcome"] == "critical"
    assert reason in f"{critical['text']} {[one['text'] for one in answer.results('gpus')]}"
    assert critical["remedy"]
    for name in ("gpus", "gpu-memory", "nvlink", "pcie"):
        assert answer.results(name)[0]["outcome"] == "unknown", name
