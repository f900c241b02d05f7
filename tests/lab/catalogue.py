"""The faults from which pages come.

How each is injected, and the one page or ticket that it is to lead to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from tests.lab import faults, hardware
from tests.lab.hardware import ADAPTERS, CHECKPOINTS, DATA, JOB_NAME, PORT
from tests.lab.node import Node
from tests.lab.paging import Paging
from tests.lab.receiver import Alert

PAGE, TICKET, OWNER = "page", "ticket", "job-owner"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault, and what is to be told of it."""

    title: str
    inject: Callable[[Paging, Node], AbstractContextManager[None]]
    symptom: str
    receiver: str = PAGE
    part: Mapping[str, str] = field(default_factory=dict)
    """Labels of the alert that name the part, beside `node`."""
    probes: bool = False
    """Whether it takes probes between the nodes to tell."""

    def names(self, alert: Alert, node: Node) -> bool:
        """Tell whether an alert is the one that this fault on this node is to lead to."""
        expected = {"symptom": self.symptom, "node": node.name, **self.part}
        return alert.receiver == self.receiver and expected.items() <= alert.labels.items()


def _gpu(number: int) -> dict[str, str]:
    return {"part": f"GPU {number}"}


FAULTS: dict[str, Fault] = {
    "gpu-lost": Fault(
        title="a GPU that NVML says is lost",
        inject=lambda _, node: hardware.gpu_lost(node, 3),
        symptom="gpu-lost",
        part=_gpu(3),
    ),
    "xid-79": Fault(
        title="Xid 79 in the kernel log",
        inject=lambda lab, node: hardware.xid(
            node, lab.kernel_logs[node.name], 2, 79, "pid=4711, GPU has fallen off the bus."
        ),
        symptom="gpu-lost",
        part=_gpu(2),
    ),
    "gpu-missing": Fault(
        title="a GPU on the bus that NVML does not list",
        inject=lambda _, node: hardware.gpu_missing(node, 1),
        symptom="gpu-lost",
    ),
    "nvml-hang": Fault(
        title="NVML whose calls do not return",
        inject=lambda _, node: hardware.nvml_hangs(node),
        symptom="nvml-broken",
    ),
    "ecc": Fault(
        title="an uncorrectable ECC error",
        inject=lambda _, node: hardware.ecc_uncorrectable(node, 0),
        symptom="nccl-all-reduce-failed",
        part=_gpu(0),
    ),
    "row-remap": Fault(
        title="a memory row that could not be replaced",
        inject=lambda _, node: hardware.row_remap_failure(node, 1),
        symptom="nccl-all-reduce-failed",
        part=_gpu(1),
    ),
    "thermal": Fault(
        title="a GPU that its hardware slows down as it is too hot",
        inject=lambda _, node: hardware.thermal_slowdown(node, 2),
        symptom="gpu-throttled",
        receiver=TICKET,
        part=_gpu(2),
    ),
    "nvlink-down": Fault(
        title="an NVLink that is down",
        inject=lambda _, node: hardware.nvlink_down(node, 0, 7),
        symptom="bad-link",
        part=_gpu(0),
    ),
    "infiniband-down": Fault(
        title="an InfiniBand port that is down",
        inject=lambda _, node: hardware.infiniband_down(node, ADAPTERS[1]),
        symptom="bad-link",
        part={"part": f"{ADAPTERS[1]}/{PORT.rpartition('/')[2]}"},
    ),
    "time-wait": Fault(
        title="the rendezvous ports held by sockets in TIME_WAIT",
        inject=lambda _, node: hardware.time_wait_flood(node),
        symptom="address-in-use",
        receiver=TICKET,
    ),
    "open-files": Fault(
        title="a process of a training job with nearly all the open files it may have",
        inject=lambda _, node: hardware.open_files(node, 990, 1024),
        symptom="open-files",
        receiver=TICKET,
        part={"training_job": JOB_NAME},
    ),
    "disk-full": Fault(
        title="a disk that is nearly full",
        inject=lambda _, node: hardware.disk_full(node, 0.98),
        symptom="disk-full",
        part={"part": DATA},
    ),
    "path-hang": Fault(
        title="a checkpoint directory whose file system hangs",
        inject=lambda _, node: hardware.path_hangs(node),
        symptom="checkpoint-path",
        part={"part": CHECKPOINTS},
    ),
    "slow-node": Fault(
        title="a node whose network is slow",
        inject=lambda _, node: faults.slow(node, 10),
        symptom="straggler",
        receiver=TICKET,
        probes=True,
    ),
    "node-dead": Fault(
        title="a node that is gone from the network",
        inject=lambda _, node: faults.unplug(node),
        symptom="agent-gone",
    ),
}
WITHOUT_PROBES = [name for name, fault in FAULTS.items() if not fault.probes]
