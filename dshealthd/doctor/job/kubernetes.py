"""The pods of a manifest have as many processes as GPUs, shared memory, and can meet."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.core.text import plural
from dshealthd.doctor.check import Result, check_of, critical, ok, unknown, warning
from dshealthd.doctor.job.agreement import disagreements, occupancy
from dshealthd.doctor.job.sources.layout import Layout, torchrun
from dshealthd.doctor.job.sources.manifest import (
    CONTROLLERS,
    INDEX,
    MIB,
    QUEUE,
    SHARED_MEMORY,
)
from dshealthd.doctor.job.sources.rendezvous import rendezvous
from dshealthd.doctor.job.start import Start
from dshealthd.jobs.environment import TIMEOUT, is_loopback, natural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dshealthd.doctor.job.context import JobContext
    from dshealthd.doctor.job.sources.manifest import Manifest, PodTemplate
    from dshealthd.doctor.job.sources.source import Source

_MPI = ("mpirun", "mpiexec")
_RELEASE = re.compile(r"v?(\d+(?:\.\d+)+)")
_OF_PODS = re.compile(r"[a-z0-9][a-z0-9-]*-\d+")
"""Names that StatefulSets, indexed Jobs, JobSets and PyTorchJobs give their pods."""


def _manifest(_context: JobContext, source: Source[Manifest]) -> Iterator[Result]:
    if source.value is None:
        yield unknown(f"{source.name}: {source.problem}", component=source.name)
        return
    pods = source.value.pods
    found = [result for pod in pods for result in _judged(pod, source.value)]
    yield from found
    if not found:
        gpus = sum(pod.count * pod.gpus for pod in pods)
        count = plural(sum(pod.count for pod in pods), "pod")
        yield ok(f"{source.name}: {count} with {plural(gpus, 'GPU')}")


def _judged(pod: PodTemplate, manifest: Manifest) -> Iterator[Result]:
    start, where = start_of(pod, manifest), f"{pod.kind} {pod.job}, {pod.name}"
    yield from disagreements(start)
    yield from occupancy(start, where)
    for need in NEEDS:
        for text in need.broken(pod, start, manifest):
            yield need.make(f"{where}: {text}", need.remedy, component=need.component)


def start_of(pod: PodTemplate, manifest: Manifest) -> Start:
    """Return what the pods of a template start."""
    layout = _layout(pod)
    with_gpus = [one for one in manifest.pods if one.gpus]
    workers = sum(one.count for one in with_gpus)
    is_first = with_gpus[:1] == [pod] and (layout.nodes or 0) > 1
    return Start(
        command=pod.command,
        layout=layout,
        variables=pod.variables,
        nodes=workers if is_first else None,
        given=f"{plural(workers, 'pod has', 'pods have')} GPUs",
        gpus=pod.gpus,
        memory=pod.memory if pod.gpus else None,
        copies=pod.count,
        name=f"{pod.kind} {pod.job}, {pod.name}: ",
    )


def _layout(pod: PodTemplate) -> Layout:
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


class PodNeed(NamedTuple):
    """Something that the pods of a template need."""

    broken: Callable[[PodTemplate, Start, Manifest], Iterator[str]]
    component: str
    remedy: str = ""
    make: Callable[..., Result] = critical


def _refused(pod: PodTemplate, _start: Start, _manifest: Manifest) -> Iterator[str]:
    yield from (f"the API server refuses it: {one}" for one in pod.refused)


def _misread(pod: PodTemplate, _start: Start, _manifest: Manifest) -> Iterator[str]:
    yield from pod.misread


def _behind_proxy(pod: PodTemplate, _start: Start, manifest: Manifest) -> Iterator[str]:
    several = sum(one.count for one in manifest.pods) > 1
    if pod.proxy and several and pod.is_training and pod.has_cluster_names:
        yield (
            f"{pod.proxy} puts its sidecar into it: connections of the rendezvous and of NCCL go"
            " through a proxy, and ranks hang or are refused; a label of the pods opts out, such as"
            ' sidecar.istio.io/inject: "false"'
        )


def _locked(pod: PodTemplate, _start: Start, _manifest: Manifest) -> Iterator[str]:
    if pod.is_locked and pod.gpus:
        yield (
            "it has RDMA devices but not the capability IPC_LOCK: memory cannot be registered"
            " with them beyond the runtime's limit (memlock), often 8 MiB"
        )


def _unserved(pod: PodTemplate, _start: Start, manifest: Manifest) -> Iterator[str]:
    """Yield why the Service of the pods' domain gives them no names."""
    meeting = rendezvous(pod.command, pod.variables).address
    is_asked = pod.domain and meeting.partition(".")[2].partition(".")[0] == pod.domain
    for service in manifest.services if is_asked else ():
        if service["name"] != pod.domain:
            continue
        if not service["is_headless"]:
            yield f"{meeting[:80]} does not resolve: the Service {pod.domain} is not headless"
        if pod.awaits and not service["is_early"]:
            yield (
                f"{meeting[:80]} does not resolve until its pod is ready (readinessProbe), unless"
                f" the Service {pod.domain} has publishNotReadyAddresses: true"
            )
        of_job = {"job-name": pod.job, "batch.kubernetes.io/job-name": pod.job}
        have = {**of_job, **pod.labels} if pod.kind == "Job" else pod.labels
        for name, value in service["selector"].items():
            given = have.get(name, value if "/" in name else "")
            if given != value:
                yield (
                    f"{meeting[:80]} does not resolve: the Service {pod.domain} selects"
                    f" {name}={value}, which these pods are not"
                )


def _same_index(pod: PodTemplate, start: Start, _manifest: Manifest) -> Iterator[str]:
    rank = start.torchrun.options.get("node-rank", "") if start.torchrun else ""
    rank = rank or pod.variables.get("RANK", "")
    if pod.groups > 1 and re.fullmatch(rf"\$\{{?{INDEX}\}}?", rank):
        yield f"{INDEX} begins with 0 in each of the {pod.groups} jobs: ranks must differ"


def _killed(pod: PodTemplate, _start: Start, _manifest: Manifest) -> Iterator[str]:
    ends = pod.kind.endswith(("Job", "JobSet", "Pod"))  # servers are another matter
    if ends and pod.is_training and pod.gpus and (pod.patience or TIMEOUT) < TIMEOUT:
        yield (
            f"the liveness probe kills a container that does not answer for {pod.patience} s, also"
            f" while it loads or saves a checkpoint; collectives wait {TIMEOUT} s"
        )


def _without_shared_memory(pod: PodTemplate, _start: Start, manifest: Manifest) -> Iterator[str]:
    few = 64 * MIB
    alike = [one for one in manifest.pods if one.is_training and one.gpus > 1]
    short = [one for one in alike if (one.shared_memory or few + 1) <= few]
    if short[:1] == [pod]:  # once for all templates
        yield (
            f"{SHARED_MEMORY} has {(pod.shared_memory or 0) // MIB} MB, the default where nothing"
            " larger is mounted: too few for NCCL between GPUs of a pod and for data loaders"
        )


def _beyond_memory(pod: PodTemplate, _start: Start, _manifest: Manifest) -> Iterator[str]:
    shared = pod.shared_memory or 0
    if pod.gpus and pod.memory and shared > pod.memory:
        yield (
            f"{SHARED_MEMORY} may take {shared // MIB} MiB, which count as memory of the container,"
            f" limited to {pod.memory // MIB} MiB: it is killed for it"
        )


def _loopback(pod: PodTemplate, start: Start, _manifest: Manifest) -> Iterator[str]:
    meeting = rendezvous(pod.command, pod.variables)
    inner = start.torchrun
    is_one = inner is not None and inner.number("nnodes") == 1
    if pod.command and pod.count > 1 and is_loopback(meeting.address) and not is_one:
        shown = f"{meeting.address[:80]} ({meeting.source})"
        yield f"{shown} is each pod's own loopback, but there are {pod.count} of them"


def _not_found(pod: PodTemplate, _start: Start, manifest: Manifest) -> Iterator[str]:
    """Yield that the name of the pod or Service where ranks meet is none, or does not resolve."""
    meeting = rendezvous(pod.command, pod.variables)
    host, _, domain = meeting.address.partition(".")
    is_named = pod.command is not None and bool(_OF_PODS.fullmatch(host))
    shown = f"{meeting.address[:80]} ({meeting.source})"
    is_joined = pod.joins_service and sum(one.count for one in manifest.pods) > 1
    if not pod.has_cluster_names and (is_named or (is_joined and not meeting.address)):
        shown = shown if is_named else f"the Service at which pods of a {pod.kind} meet"
        yield (
            f"{shown} does not resolve: a pod with hostNetwork resolves names of the cluster only"
            " with dnsPolicy: ClusterFirstWithHostNet"
        )
    if not is_named:
        return
    known = [one.names for one in manifest.pods]
    of_pods = {name for names in known for name in names or ()}
    services = {service["name"] for service in manifest.services}
    if None not in known and host not in of_pods | services:
        few = ", ".join(sorted(of_pods)[:4])
        yield f"MASTER_ADDR {shown} is no pod of this manifest, which has {few}"
    elif pod.kind in {"Job", "JobSet", "StatefulSet"} and domain.partition(".")[0] != pod.domain:
        where = f"are in the subdomain {pod.domain}" if pod.domain else "have no subdomain"
        yield f"{shown} does not resolve: pods of this {pod.kind} {where}"


def _gang(pod: PodTemplate, _start: Start, manifest: Manifest) -> Iterator[str]:
    count = sum(one.count for one in manifest.pods)
    if pod is manifest.pods[0] and pod.gang is not None and pod.gang > count:
        yield f"the job starts only once {pod.gang} pods are placed (minAvailable), but has {count}"


def _slots(pod: PodTemplate, _start: Start, manifest: Manifest) -> Iterator[str]:
    workers = sum(one.count for one in manifest.pods if one.is_worker)
    slots = (natural(pod.processes) or 1) * workers
    words = [word for text in pod.words for word in text.split()]
    is_mpi = pod.kind == "MPIJob" and any(word.rpartition("/")[2] in _MPI for word in words)
    at = next((at for at, word in enumerate(words[:-1]) if word in {"-np", "-n", "--np"}), None)
    wanted = natural(words[at + 1]) if is_mpi and at is not None else None
    if wanted and wanted > slots:
        have = f"{plural(workers, 'worker has', 'workers have')} {plural(slots, 'slot')}"
        yield f"mpirun -np {wanted}, but {have}"


def _releases(pod: PodTemplate, _start: Start, manifest: Manifest) -> Iterator[str]:
    """Yield that pods of one job have images of one repository, but of different releases."""
    found: dict[str, dict[str, str]] = {}
    for one in manifest.pods:
        repository, _, tag = one.image.rpartition(":")
        if one.job == pod.job and (release := _RELEASE.match(tag)):
            found.setdefault(repository, {})[release[1]] = one.name
    for repository, releases in found.items():
        if len(releases) > 1 and pod.name == next(iter(releases.values())):
            shown = ", ".join(f"{release} of {name}" for release, name in releases.items())
            yield f"its pods have different versions of {repository}: {shown}"


def _mounted(pod: PodTemplate, _start: Start, manifest: Manifest) -> Iterator[str]:
    for claim in sorted({*pod.claims} & {*manifest.of_one}):
        if pod.count > 1 and pod.gpus:
            yield f"the claim {claim} is ReadWriteOnce, so only pods of one node can mount it"


def _not_given(pod: PodTemplate, _start: Start, _manifest: Manifest) -> Iterator[str]:
    text = "\n".join((*pod.words, *pod.variables.values()))
    for name, controller in CONTROLLERS.items() if pod.given is not None else ():
        is_set = name in (pod.given or ()) or name in pod.variables
        is_read = re.search(rf"\$[({{]?{name}\b(?!:)", text)
        if is_read and not is_set and not re.search(rf"(?<![$\w-]){name}=", text):
            yield f"it uses {name}, which only {controller} sets"


def _unqueued(pod: PodTemplate, _start: Start, _manifest: Manifest) -> Iterator[str]:
    if not pod.is_queued:
        yield f"Kueue reads {QUEUE} of the {pod.kind} itself, not of its pods: it never starts it"


def _elastic(pod: PodTemplate, start: Start, manifest: Manifest) -> Iterator[str]:
    inner = start.torchrun
    text = inner.options.get("nnodes", "") if inner else ""
    least, most = pod.members
    if ":" in text:
        least, most = (natural(one) for one in text.split(":", 1))
    if least is None or most is None or least == most or pod is not manifest.pods[0]:
        return
    if least > most:
        yield f"at least {least} and at most {most} pods cannot be"
    elif not pod.replaces:
        yield (
            f"it trains on {least} to {most} pods, but none that fails is replaced: the first ends"
            " the job (backoffLimit, restartPolicy)"
        )


NEEDS = (
    PodNeed(_refused, "API"),
    PodNeed(_misread, "command"),
    PodNeed(_behind_proxy, "sidecar", make=warning),
    PodNeed(_locked, "IPC_LOCK", make=warning),
    PodNeed(_unserved, "Service"),
    PodNeed(_same_index, INDEX),
    PodNeed(_releases, "image"),
    PodNeed(_unqueued, QUEUE),
    PodNeed(_not_given, "env"),
    PodNeed(_mounted, "persistentVolumeClaim", make=warning),
    PodNeed(_loopback, "MASTER_ADDR"),
    PodNeed(_not_found, "MASTER_ADDR"),
    PodNeed(_slots, "slotsPerWorker"),
    PodNeed(_gang, "minAvailable"),
    PodNeed(_elastic, "elasticPolicy", "kubectl explain job.spec.backoffLimit", warning),
    PodNeed(_killed, "livenessProbe", "kubectl explain pod.spec.containers.livenessProbe", warning),
    PodNeed(
        _without_shared_memory,
        SHARED_MEMORY,
        f"kubectl explain pod.spec.volumes.emptyDir  # medium: Memory, at {SHARED_MEMORY}",
        warning,
    ),
    PodNeed(_beyond_memory, SHARED_MEMORY, make=warning),
)
"""What the pods of a template need."""
MANIFEST = check_of(
    lambda job: job.manifest,
    "no manifest is given (FILE)",
    "device-ordinal",
    "manifest",
    "Pods have a process for each GPU, shared memory, and can meet",
    _manifest,
)
