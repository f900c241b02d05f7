"""What the pods of a template start, and what they have for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dshealthd.core.text import plural
from dshealthd.doctor.job.sources import programs
from dshealthd.doctor.job.sources.calls import OF_OPERATOR
from dshealthd.doctor.job.sources.fields import ManifestFields
from dshealthd.doctor.job.sources.layout import Layout, torchrun
from dshealthd.doctor.job.sources.manifest import SHARED_MEMORY, Manifest, PodTemplate
from dshealthd.doctor.job.start import Start
from dshealthd.jobs.environment import TIMEOUT, natural

_GRACE = 30
"""Seconds of terminationGracePeriodSeconds where none are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodStart(Start):
    """What the pods of a template start."""

    pod: PodTemplate
    manifest: Manifest

    @property
    def total(self) -> int:
        """Pods of the manifest."""
        return sum(one.count for one in self.manifest.pods)

    @property
    def alike(self) -> list[PodTemplate]:
        """The templates of the same object."""
        return [one for one in self.manifest.pods if one.object is self.pod.object]


def start_of(pod: PodTemplate, manifest: Manifest) -> PodStart:
    """Return what the pods of a template start."""
    layout, main = _layout(pod), pod.main
    with_gpus = [one for one in manifest.pods if one.gpus]
    alike = [one for one in with_gpus if one.object is pod.object and waits(one, layout.nodes)]
    if pod.kind == "JobSet":  # a job of which all nodes are its own is a launch of its own
        is_whole = pod.count == layout.nodes
        alike = [one for one in alike if one is pod or (not is_whole and one.count != layout.nodes)]
    # others may be of the launch, too, or of another job
    least, most = (sum(one.count for one in some) for some in (alike, with_gpus))
    workers = min(max(layout.nodes or 0, least), most)
    is_first = alike[:1] == [pod] and (layout.nodes or 0) > 1
    memory = pod.limits.size("memory")
    probe, shared = main.at("livenessProbe"), pod.shared_memory
    ends = pod.kind.endswith(("Job", "JobSet", "Pod"))  # servers are another matter
    patience = probe.number("periodSeconds", 10) * probe.number("failureThreshold", 3)
    volume = pod.mounts.get(SHARED_MEMORY, (None, ManifestFields()))[1]
    in_memory = pod.gpus and volume.stated("emptyDir.medium") == "Memory"
    scheduling = pod.above.at("runPolicy", "schedulingPolicy")
    ranked = [one for one in manifest.pods if one.is_worker]
    return PodStart(
        pod=pod,
        manifest=manifest,
        command=pod.command,
        calls=pod.calls,
        layout=layout,
        variables=pod.variables,
        nodes=workers if is_first else None,
        given=f"{plural(workers, 'pod has', 'pods have')} GPUs",
        gpus=pod.gpus,
        memory=memory if pod.gpus else None,
        copies=pod.count,
        groups=pod.groups,
        deadline=pod.deadline,
        more={
            "processes of a pod": natural(pod.processes),
            "patience": patience if probe and ends and pod.is_training and pod.gpus else None,
            "timeout": TIMEOUT,
            "shared memory": shared >> 20 if in_memory and shared and memory else None,
            "limit": (memory or 0) >> 20,
            "gang": natural(pod.above.text("minAvailable") or scheduling.text("minAvailable")),
            "pods": sum(one.count for one in manifest.pods),
            "processes of the operator's hosts": _of_mpirun(pod) or None,
            "slots": (natural(pod.processes) or 1) * sum(one.count for one in ranked),
            "GPUs of workers": sum(one.count * one.gpus for one in ranked),
            "GPUs of Ray": pod.gpus_of_ray,
            "grace": pod.spec.number("terminationGracePeriodSeconds", _GRACE),
            "hook": (pod.before_stop if pod.gpus else 0) or None,
        },
    )


def waits(pod: PodTemplate, nodes: int | None) -> bool:
    """Return whether the pods start a torchrun that waits for so many nodes."""
    return bool(nodes) and _layout(pod).nodes == nodes


def _of_mpirun(pod: PodTemplate) -> int | None:
    """Return the processes that Open MPI refuses to start beyond the slots of the operator's
    hostfile; None where something else decides.
    """
    if pod.kind != "MPIJob" or pod.above.text("mpiImplementation") not in {"", "OpenMPI"}:
        return None
    text = " ".join((*pod.words, *pod.variables)).lower()
    for one in (one for one in pod.calls if one.program in programs.MPI):
        given = one.options
        counts = [given[name][0] for name in given if name in {"np", "n", "c"}]
        count = natural("".join(counts[:1]))  # those behind may be of the program that it starts
        if count and "oversubscribe" not in text and one.hosts <= OF_OPERATOR:
            return count
    return None


def _layout(pod: PodTemplate) -> Layout:
    command = pod.command
    stated = natural(pod.processes) if pod.is_worker or pod.kind != "MPIJob" else None
    if command is not None and (inner := command.find("torchrun")) is not None:
        found = torchrun(inner, pod.gpus)
        return found if found.ranks_per_node else replace(found, ranks_per_node=stated)
    if command is not None and (inner := command.find("deepspeed")) is not None:
        return Layout(ranks_per_node=inner.number("num-gpus"), source="deepspeed")
    is_python = command is not None and command.program == "python"
    if pod.kind == "PyTorchJob" and not pod.processes and is_python:
        stated = 1  # its operator makes each pod a rank
    words = command.arguments if command is not None and is_python else ()
    if stated is None and any("trainer.devices=" in word for word in words):
        devices = natural(command.stated.get("devices")) if command else None
        return Layout(ranks_per_node=devices or None, source="devices of Lightning")
    return Layout(ranks_per_node=stated, source=pod.kind)
