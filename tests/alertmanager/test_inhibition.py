"""What is told and what is held back, by a real Alertmanager.

Alerts are posted to it, and its webhooks seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from dshealthd.findings.catalogue import catalogue
from dshealthd.symptoms.entry import RULESET
from tests.lab.receiver import Receiver
from tests.lab.servers import Server

Labels = dict[str, str]

NETWORK = ("bad-link", "nccl-timeout", "slow-communication", "straggler")


def alert(
    symptom: str, severity: str = "critical", component: str = "node", **labels: str
) -> Labels:
    """Return the labels of an alert."""
    return {
        **RULESET,
        "alertname": f"Test {symptom}",
        "symptom": symptom,
        "severity": severity,
        "component": component,
        "job": "dshealthd",
        **labels,
    }


def hang(cause: str, job: str, **labels: str) -> Labels:
    """Return the page of a job that hangs, of a class."""
    labels |= {"alertname": "DshealthdJobHang", "training_job": job, "class": cause}
    return alert("training-hang", component="job", **labels)


def path(name: str, part: str, severity: str = "critical", reason: str = "") -> Labels:
    """Return what a node finds of a path, with the labels that findings have."""
    symptom, why = catalogue()[name].slug, {"reason": reason} if reason else {}
    return alert(symptom, severity, "path", alertname=name, node="a", part=part, **why)


SHORT = partial(alert, "host-memory-pressure", "warning", alertname="DshealthdHostMemoryPressure")
KILL = "OOM kill: the kernel has killed processes"
GPU = {"node": "a", "part": "GPU 3"}
OUT_OF_MEMORY = {
    "node": "a",
    "alertname": "DshealthdJobFailed",
    "audience": "owner",
    "reason": "rank 3 was killed, and the kernel reports an OOM kill here",
}

MAINTENANCE = {"alertname": "DshealthdMaintenance"}
MANY = {"alertname": "DshealthdManyNodes"}

SCENES: Mapping[str, tuple[list[Labels], list[Labels]]] = {
    "a node in maintenance, over all of its own, its absence too, and over none of another's": (
        [
            alert("gpu-lost", component="gpu", node="b", part="GPU 3"),
            alert("agent-gone", component="fleet"),
        ],
        [
            alert("maintenance", "warning", node="a", **MAINTENANCE),  # is told to nobody
            alert("agent-gone", node="a"),
            alert("gpu-lost", component="gpu", **GPU),
            alert("time-wait", "warning", node="a"),
            alert("loss-nan", "warning", "job", node="a", training_job="slurm-7", audience="owner"),
            alert("nccl-timeout", node="a", part="a"),
        ],
    ),
    "a node that is down, over all of its own and what others say of it": (
        [alert("agent-gone", node="a")],
        [
            alert("gpu-lost", component="gpu", **GPU),
            alert("time-wait", "warning", node="a"),
            alert("nccl-timeout", node="a", part="a"),
            alert("disk-full", component="path", node="a", part="/data"),
        ],
    ),
    "a node that is down, over none of another's": (
        [alert("agent-gone", node="a"), alert("gpu-lost", component="gpu", node="b", part="GPU 3")],
        [],
    ),
    "a node that is down, over nothing that names no node": (
        [alert("agent-gone"), alert("watchdog", "none"), alert("node-drift")],
        [],
    ),
    "most nodes at once, over each of them": (
        [alert("agent-gone", component="fleet"), alert("gpu-lost", component="gpu", **GPU)],
        [alert("agent-gone", node="b"), alert("agent-gone", node="c")],
    ),
    "what many nodes have at once, over the pages of these nodes, and no others": (
        [
            *(alert("checkpoint-path", component="fleet", node=node, **MANY) for node in "ab"),
            alert("checkpoint-path", component="path", node="c", part="/ckpt"),
            alert("gpu-lost", component="gpu", **GPU),
            alert("checkpoint-path", "warning", "path", node="a", part="/scratch"),
        ],
        [
            alert("checkpoint-path", component="path", node="a", part="/ckpt"),
            alert("checkpoint-path", component="path", node="b", part="/ckpt"),
        ],
    ),
    "a page about many nodes, over their tickets of that kind": (
        [
            *(alert("gpu-throttled", component="fleet", node=node, **MANY) for node in "ab"),
            alert("gpu-throttled", "warning", "gpu", node="c", part="GPU 0", many="page"),
        ],
        [
            alert("gpu-throttled", "warning", "gpu", node="a", part="GPU 0", many="page"),
            alert("gpu-throttled", "warning", "gpu", node="a", part="GPU 1", many="page"),
            alert("gpu-throttled", "warning", "gpu", node="b", part="GPU 0", many="page"),
        ],
    ),
    "a node that only Prometheus does not reach, over nothing of it": (
        [
            alert("agent-gone", "warning", node="a"),
            alert("nccl-remote-error", node="a", part="a"),
        ],
        [],
    ),
    "a ticket about targets, over no node that is gone": (
        [alert("agent-gone", "warning", "fleet"), alert("agent-gone", node="b")],
        [],
    ),
    "most nodes at once, over those of them that went at once": (
        [alert("agent-gone", component="fleet")],
        [
            alert("agent-gone", component="fleet", node="a", **MANY),
            alert("agent-gone", node="b"),
        ],
    ),
    "a leaf switch, over its nodes that have it at once": (
        [alert("bad-link", component="leaf", leaf="l1")],
        [
            alert("bad-link", component="fleet", node="a", leaf="l1", **MANY),
            alert("bad-link", component="nic", node="a", leaf="l1", part="mlx5_0/1"),
        ],
    ),
    "critical over warning of the same symptom of the same part": (
        [alert("gpu-throttled", component="gpu", **GPU)],
        [alert("gpu-throttled", "warning", "gpu", **GPU)],
    ),
    "but not of another GPU, another symptom or another path": (
        [
            alert("gpu-throttled", component="gpu", **GPU),
            alert("gpu-throttled", "warning", "gpu", node="a", part="GPU 4"),
            alert("cuda-oom", "warning", "gpu", **GPU),
            alert("disk-full", component="path", node="a", part="/data"),
            alert("disk-full", "warning", "path", node="a", part="/scratch"),
        ],
        [],
    ),
    "critical of a job on a node, over the same symptom that no job is named for": (
        [
            alert("open-files", node="a", training_job="slurm-7"),
            alert("open-files", "warning", node="b"),
        ],
        [
            alert("open-files", "warning", node="a"),
            alert("open-files", "warning", node="a", training_job="slurm-7"),
        ],
    ),
    "critical over warning of the same job, and not of another": (
        [
            alert("training-slow", component="job", training_job="slurm-7"),
            alert("training-slow", "warning", "job", training_job="slurm-8"),
        ],
        [alert("training-slow", "warning", "job", training_job="slurm-7")],
    ),
    "a leaf switch over its nodes and the ways to them": (
        [
            alert("bad-link", component="leaf", leaf="l1"),
            alert("agent-gone", node="d", leaf="l2"),
        ],
        [
            *(
                alert(
                    symptom,
                    component="nic" if symptom == "bad-link" else "node",
                    node="a",
                    leaf="l1",
                )
                for symptom in NETWORK
            ),
            alert("agent-gone", node="b", leaf="l1"),
        ],
    ),
    "but not over disks and GPUs of its nodes": (
        [
            alert("slow-communication", component="leaf", leaf="l1"),
            alert("disk-full", component="path", node="a", leaf="l1", part="/data"),
            alert("gpu-lost", component="gpu", leaf="l1", **GPU),
            alert("straggler", "warning", node="e"),
        ],
        [],
    ),
    "a GPU that is lost, over what follows for the same GPU": (
        [
            alert("gpu-lost", component="gpu", **GPU),
            alert("gpu-throttled", component="gpu", node="a", part="GPU 4"),
        ],
        [
            alert("bad-link", component="gpu", **GPU),
            alert("nvml-broken", component="gpu", **GPU),
        ],
    ),
    "NVML that hangs, over readings that are missing": (
        [alert("nvml-broken", node="a"), alert("gpu-metrics-gone", node="b")],
        [alert("gpu-metrics-gone", node="a"), alert("collector-failing", "warning", node="a")],
    ),
    "a job that hangs, over its stragglers": (
        [
            alert("training-hang", component="job", training_job="slurm-7"),
            alert("straggler", "warning", "job", training_job="slurm-8"),
            alert("straggler", "warning", node="c"),
        ],
        [alert("straggler", "warning", "job", node="a", training_job="slurm-7")],
    ),
    "a hang whose cause is known, over that of the same job without one, and not of another": (
        [
            hang("network", "slurm-7", node="a", part="a--b"),
            hang("gpu", "slurm-8", node="c", gpu="3"),
            hang("unknown", "slurm-9"),
            hang("fabric", "slurm-10"),
        ],
        [hang("unknown", "slurm-7"), hang("fabric", "slurm-8")],
    ),
    "a hang whose culprit one Prometheus sees, over that of the same job without one by another": (
        [
            hang("process", "slurm-7", node="a", rank="1"),
            hang("desync", "slurm-8", node="c", rank="3"),
            hang("desync", "slurm-9"),
        ],
        [hang("desync", "slurm-7"), hang("desync", "slurm-8")],
    ),
    "a rank that ran out of memory, over the others that wait for it": (
        [
            alert("child-failed", "warning", "job", training_job="slurm-7", **OUT_OF_MEMORY),
            alert("training-hang", component="job", node="a", training_job="slurm-8"),
        ],
        [alert("training-hang", component="job", node="a", training_job="slurm-7")],
    ),
    "a rank that was killed out of memory, over the kill": (
        [
            alert("child-failed", "warning", "job", training_job="slurm-7", **OUT_OF_MEMORY),
            SHORT(node="b", reason=KILL),
            SHORT(node="a", reason="little memory is available, and an OOM kill is near"),
        ],
        [SHORT(node="a", reason=KILL)],
    ),
    "a node whose rounds hang, over that it is slow; a ticket about a GPU is none": (
        [
            alert("nccl-timeout", node="a"),
            alert("straggler", "warning", node="b"),
            alert(
                "nccl-all-reduce-failed",
                "warning",
                "gpu",
                alertname="DshealthdGpuRepairDue",
                node="b",
                part="GPU 3",
            ),
        ],
        [alert("straggler", "warning", node="a"), alert("slow-communication", "warning", node="a")],
    ),
    "a part that is broken, over that its node is slow": (
        [
            alert("bad-link", component="nic", node="a", device="mlx5_0", port="1"),
            alert("bad-link", "warning", "nic", node="b", device="x"),
        ],
        [alert("straggler", "warning", node="a")],
    ),
    "NVML that hangs, and memory that is bad, over rounds that fail on their nodes": (
        [
            alert("nvml-broken", node="a"),
            alert("nccl-all-reduce-failed", component="gpu", **GPU | {"node": "b"}),
            alert("nccl-timeout", node="c"),
        ],
        [
            alert("nccl-timeout", node="a"),
            alert("nccl-remote-error", node="b"),
            alert("straggler", "warning", node="b"),
        ],
    ),
    "a part that a job depends on, over that the job hangs there, and not on another node": (
        [
            alert("gpu-lost", component="gpu", **GPU),
            alert("training-hang", component="job", node="b", training_job="slurm-7"),
            alert("training-hang", component="job", node="a", **{"class": "process"}),
            alert("training-hang", component="job", node="a", **{"class": "desync"}),
        ],
        [alert("training-hang", component="job", node="a", training_job="slurm-7")],
    ),
    "but a warning of a part holds back nothing": (
        [
            alert("bad-link", "warning", "nic", node="b", device="x"),
            alert("straggler", "warning", node="b"),
        ],
        [],
    ),
    "a full disk, over that nothing can be written there, and not over a path that hangs": (
        [
            path("DshealthdFilesystemFull", "/data"),
            path("DshealthdPathFailing", "/ckpt"),
            path("DshealthdPathFailing", "/data", reason="hangs"),
        ],
        [
            path("DshealthdPathFailing", "/data"),
            path("DshealthdStorageTrouble", "/data", "warning"),
        ],
    ),
    "a disk that is filling, over nothing": (
        [
            path("DshealthdFilesystemFull", "/data", "warning", reason="is filling up: soon"),
            path("DshealthdPathFailing", "/data"),
        ],
        [],
    ),
}


def identity(labels: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """Return labels as a member of a set."""
    return frozenset(labels.items())


@pytest.fixture(scope="module")
def told(server: Server, receiver: Receiver) -> dict[str, list[frozenset[tuple[str, str]]]]:
    """Post every scene, each in a cluster of its own.

    Return what was told of it, two seconds after all that is expected has come.
    """
    alerts = [
        {"labels": labels | {"cluster": scene}}
        for scene, groups in SCENES.items()
        for group in groups
        for labels in group
    ]
    server.ask("/api/v2/alerts", alerts)
    everybody = ("page", "ticket", "job-owner", "watchdog")
    expected = sum(len(shown) for shown, _ in SCENES.values())
    receiver.wait(lambda: len(receiver.firing(*everybody)) >= expected, 60)
    receiver.wait(lambda: len(receiver.firing(*everybody)) > expected, 2)
    found: dict[str, list[frozenset[tuple[str, str]]]] = {scene: [] for scene in SCENES}
    for entry in receiver.firing(*everybody):
        found[entry.labels["cluster"]].append(
            identity({key: value for key, value in entry.labels.items() if key != "cluster"})
        )
    return found


@pytest.mark.parametrize("scene", SCENES)
def test_inhibition(scene: str, told: Mapping[str, list[Any]]) -> None:
    """Of the alerts of a scene, those that are causes or stand alone are told, and their
    consequences are held back.
    """
    shown, held_back = SCENES[scene]
    assert set(told[scene]) == set(map(identity, shown)), f"held back should be {held_back}"
