"""What the checks of a node have in common, and what all nodes of a job must share."""

from __future__ import annotations

import os
from typing import Any

import pytest

from dshealthd.config import config
from dshealthd.doctor.node_context import NodeContext, facts


def context(**metrics: list[tuple[dict[str, str], float]]) -> NodeContext:
    """Return the context of a node whose agent has these samples."""
    document: dict[str, Any] = {
        f"dshealthd_{name}": {
            "samples": [{"labels": labels, "value": value} for labels, value in samples]
        }
        for name, samples in metrics.items()
    }
    return NodeContext(config.load(None), {"metrics": document})


HOST = {"kernel": os.uname().release, "architecture": os.uname().machine}
PORT = {"device": "mlx5_0", "port": "1"}
OTHER = {"device": "mlx5_1", "port": "1"}
KERNEL = {"training_job": "", "component": "kernel", "environment": ""}


def test_facts_of_a_node() -> None:
    """In words that are the same on two nodes that are alike."""
    assert facts(context()) == HOST
    found = facts(
        context(
            gpu_driver_info=[({"driver": "570.1", "cuda": "12.8"}, 1)],
            gpus_visible=[({}, 2)],
            gpu_info=[({"gpu": "1", "name": "H200"}, 1), ({"gpu": "0", "name": "H100"}, 1)],
            nvlinks_up=[({"gpu": "0"}, 18), ({"gpu": "1"}, 17)],
            infiniband_port_up=[(PORT, 1), (OTHER, 0)],
            infiniband_port_rate_bytes_per_second=[(PORT, 5e10), (OTHER, 2.5e10)],
            infiniband_device_info=[({"device": "mlx5_0", "firmware": "28.1"}, 1)],
            sysctl_value=[({"sysctl": "vm.swappiness"}, 60)],
            software_info=[
                (KERNEL | {"version": "6.1-ours"}, 1),
                (KERNEL | {"component": "torch", "environment": "/opt/t", "version": "2.8"}, 1),
                (KERNEL | {"component": "torch", "training_job": "run-1", "version": "2.7"}, 1),
            ],
            filesystem_size_bytes=[({"path": "/dev/shm"}, 64 << 30), ({"path": "/"}, 1 << 30)],
        )
    )
    assert found == HOST | {
        "gpu driver": "570.1",
        "gpu cuda": "12.8",
        "gpu nvml": "unknown",
        "gpus": "2",
        "gpu models": "H100, H200",
        "nvlinks up": "35",
        "infiniband ports up": "1",
        "infiniband rates": "200 Gb/s, 400 Gb/s",
        "infiniband firmware": "28.1",
        "sysctl vm.swappiness": "60",
        "kernel": "6.1-ours",
        "version of torch of /opt/t": "2.8",
        "shared memory": "64 GiB",
    }
    assert "nvlinks up" not in facts(context(nvlinks_up=[({"gpu": "0"}, 0)]))


@pytest.mark.parametrize(("expected", "visible", "has"), [
    (None, None, False),
    (0, 0, False),
    (8, None, True),
    (None, 8, True),
])  # fmt: skip
def test_gpus_are_on_the_bus_or_in_nvml(
    expected: float | None, visible: float | None, *, has: bool
) -> None:
    """Either shows that the node has some."""
    counts = {"gpus_expected": expected, "gpus_visible": visible}
    known: dict[str, Any] = {
        name: [({}, count)] for name, count in counts.items() if count is not None
    }
    assert context(**known).has_gpus is has
    assert not context(**known).has_infiniband
    assert context(infiniband_port_up=[(PORT, 0)]).has_infiniband
