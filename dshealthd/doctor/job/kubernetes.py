"""The pods of a manifest have as many processes as GPUs, shared memory, and can meet."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from dshealthd.core.text import plural
from dshealthd.doctor.check import Result, check_of, critical, ok, unknown, warning
from dshealthd.doctor.job.agreement import Start, disagreements, occupancy
from dshealthd.doctor.job.sources.layout import Layout, torchrun
from dshealthd.doctor.job.sources.manifest import MIB
from dshealthd.doctor.job.sources.rendezvous import rendezvous
from dshealthd.jobs.environment import TIMEOUT, is_loopback, natural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.job.context import JobContext
    from dshealthd.doctor.job.sources.manifest import Manifest, PodTemplate
    from dshealthd.doctor.job.sources.source import Source

_MPI = ("mpirun", "mpiexec")
_OF_PODS = re.compile(r"[a-z0-9][a-z0-9-]*-\d+")
"""Names that StatefulSets, indexed Jobs, JobSets and PyTorchJobs give their pods."""


def _manifest(_context: JobContext, source: Source[Manifest]) -> Iterator[Result]:
    if source.value is None:
        yield unknown(f"{source.name}: {source.problem}", component=source.name)
        return
    pods = source.value.pods
    found = [*(one for pod in pods for one in _pod(pod, source.value)), *_together(pods)]
    yield from found
    if not found:
        gpus = sum(pod.count * pod.gpus for pod in pods)
        count = plural(sum(pod.count for pod in pods), "pod")
        yield ok(f"{source.name}: {count} with {plural(gpus, 'GPU')}")


def _pod(pod: PodTemplate, manifest: Manifest) -> Iterator[Result]:
    where = f"{pod.kind} {pod.job}, {pod.name}"
    for refused in pod.refused:
        yield critical(f"{where}: the API server refuses it: {refused}", component=pod.name)
    layout = _layout(pod)
    workers = sum(one.count for one in manifest.pods if one.gpus)
    first = next((one for one in manifest.pods if one.gpus), None)
    if pod.command is not None:
        start = Start(
            pod.command,
            layout,
            pod.variables,
            workers if pod is first and (layout.nodes or 0) > 1 else None,
            f"{plural(workers, 'pod has', 'pods have')} GPUs",
            copies=pod.count,
            name=f"{where}: ",
        )
        yield from disagreements(start)
        yield from _address(pod, where, manifest)
    yield from occupancy(layout, pod.gpus, where)
    ends = pod.kind.endswith(("Job", "JobSet", "Pod"))  # servers are another matter
    if (
        ends
        and pod.is_training
        and pod.gpus
        and pod.patience is not None
        and pod.patience < TIMEOUT
    ):
        yield warning(
            f"{where}: the liveness probe kills a container that does not answer for"
            f" {pod.patience} s, also while it loads or saves a checkpoint; collectives wait"
            f" {TIMEOUT} s",
            remedy="kubectl explain pod.spec.containers.livenessProbe",
            value=f"{pod.patience} s",
            limit=f"{TIMEOUT} s",
            component="livenessProbe",
        )


def _layout(pod: PodTemplate) -> Layout:
    """Return what starts in a pod."""
    command = pod.command
    stated = natural(pod.processes) if pod.is_worker or pod.kind != "MPIJob" else None
    if command is not None and (inner := command.find("torchrun")) is not None:
        found = torchrun(inner, pod.gpus)
        return found if found.ranks_per_node else replace(found, ranks_per_node=stated)
    if command is not None and (inner := command.find("deepspeed")) is not None:
        return Layout(ranks_per_node=inner.number("num-gpus"), source="deepspeed")
    is_image_alone = not pod.words or pod.words[0].startswith("-")
    is_python = is_image_alone or (command is not None and command.program == "python")
    if pod.kind == "PyTorchJob" and not pod.processes and is_python:
        stated = 1  # its operator makes each pod a rank
    return Layout(ranks_per_node=stated, source=pod.kind)


def _address(pod: PodTemplate, where: str, manifest: Manifest) -> Iterator[Result]:
    """Yield that the pods cannot meet at their rendezvous address."""
    meeting = rendezvous(pod.command, pod.variables)
    address = meeting.address
    shown = f"{address[:80]} ({meeting.source})"
    inner = pod.command.find("torchrun") if pod.command else None
    if pod.count > 1 and is_loopback(address) and (inner is None or inner.number("nnodes") != 1):
        yield critical(
            f"{where}: {shown} is each pod's own loopback, but there are {pod.count} of them",
            value=address,
            component="MASTER_ADDR",
        )
    host, _, domain = address.partition(".")
    if not _OF_PODS.fullmatch(host):
        return
    if not pod.has_cluster_names:
        yield critical(
            f"{where}: {shown} does not resolve: a pod with hostNetwork resolves names of the"
            " cluster only with dnsPolicy: ClusterFirstWithHostNet",
            component="dnsPolicy",
        )
    if all(manifest.names) and not any(host.startswith(f"{one}-") for one in manifest.names):
        yield critical(
            f"{where}: MASTER_ADDR {shown} is no pod of this manifest, whose names begin with"
            f" {' or '.join(f'{one}-' for one in manifest.names[:4])}",
            value=address[:80],
            component="MASTER_ADDR",
        )
    elif pod.kind in {"Job", "JobSet", "StatefulSet"} and domain.partition(".")[0] != pod.domain:
        yield critical(
            f"{where}: {shown} does not resolve: pods of this {pod.kind}"
            f" {f'are in the subdomain {pod.domain}' if pod.domain else 'have no subdomain'}",
            value=domain[:80],
            limit=pod.domain,
            component="MASTER_ADDR",
        )


def _together(pods: tuple[PodTemplate, ...]) -> Iterator[Result]:
    """Yield where the pods of a job do not fit each other."""
    few = 64 * MIB
    if without := [
        one
        for one in pods
        if one.is_training and one.gpus > 1 and (one.shared_memory or few + 1) <= few
    ]:
        yield warning(
            f"{pods[0].kind} {pods[0].job}, {', '.join(one.name for one in without)}: /dev/shm has"
            f" {(without[0].shared_memory or 0) // MIB} MB, the default where nothing larger is"
            " mounted: too few for NCCL between GPUs of a pod and for workers of data loaders",
            remedy="kubectl explain pod.spec.volumes.emptyDir  # medium: Memory, at /dev/shm",
            component=without[0].name,
        )
    count = sum(pod.count for pod in pods)
    if (gang := pods[0].gang) is not None and gang > count:
        yield critical(
            f"{pods[0].kind} {pods[0].job} starts only once {gang} pods are placed (minAvailable),"
            f" but has {count}",
            value=str(gang),
            limit=str(count),
            component="minAvailable",
        )
    workers = sum(pod.count for pod in pods if pod.is_worker)
    for pod in pods:
        slots = (natural(pod.processes) or 1) * workers
        wanted = _after(pod, "-np", "-n", "--np")
        if pod.kind == "MPIJob" and wanted and wanted > slots:
            yield critical(
                f"{pod.kind} {pod.job}: mpirun -np {wanted}, but"
                f" {plural(workers, 'worker has', 'workers have')} {plural(slots, 'slot')}",
                value=str(wanted),
                limit=str(slots),
                source="slotsPerWorker",
                component=pod.name,
            )


def _after(pod: PodTemplate, *options: str) -> int | None:
    """Return the number after one of these options of mpirun; None if there is none."""
    words = [word for text in pod.words for word in text.split()]
    if not any(word.rpartition("/")[2] in _MPI for word in words):
        return None
    at = next((at for at, word in enumerate(words[:-1]) if word in options), None)
    return None if at is None else natural(words[at + 1])


MANIFEST = check_of(
    lambda job: job.manifest,
    "no manifest is given (FILE)",
    "device-ordinal",
    "manifest",
    "Pods have a process for each GPU, shared memory, and can meet",
    _manifest,
)
