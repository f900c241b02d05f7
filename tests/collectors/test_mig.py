"""MIG devices: shown with their parent, and gone with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dshealthd.core.collector import Reason
from tests.nvml.node import Node


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """Give two H100, the second divided into three."""
    with Node(tmp_path, gpus=2) as made:
        made.simulator.set(1, "mig_mode", 1)
        made.simulator.set(1, "mig_devices", 3)
        yield made


def test_mig_devices(node: Node) -> None:
    """Each MIG device is shown with its UUID, its instance and its profile."""
    node.simulator.set(1, "mig2_uuid", "MIG-2")
    seen = node.collect()
    devices = seen.values("mig_device_info", gpu="1", uuid=node.uuid(1))
    assert len(devices) == 3
    assert ("MIG-2", "3", "1g.10gb") in devices
    assert not seen.values("mig_device_info", gpu="0")


def test_divided_gpu_is_up(node: Node) -> None:
    """A divided GPU does not tell its utilization; the rest is there and nothing is a fault."""
    seen = node.collect()
    assert {labels[0] for labels in seen.values("gpu_utilization_ratio")} == {"0"}
    assert seen.value("gpu_temperature_celsius", gpu="1", sensor="core") == 36
    assert not any(result.faults for result in seen.results.values())


def test_failing_mig_device(node: Node) -> None:
    """A failure of a MIG device is its GPU's fault, and what could be read of the others stays."""
    node.simulator.set(1, "mig1_uuid", "error:999")
    seen = node.collect()
    assert seen.reasons("mig") == {"gpu 1": Reason.UNKNOWN_ERROR}
    assert len(seen.values("mig_device_info")) == 3


def test_division_changes(node: Node) -> None:
    """MIG devices that are destroyed are gone at the next sweep."""
    node.collect("mig")
    node.simulator.set(1, "mig_devices", 1)
    assert len(node.collect("mig").values("mig_device_info")) == 1
