"""The pods of a manifest have as many processes as GPUs, what ranks need, and can meet."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dshealthd.core.text import plural
from dshealthd.doctor.check import Result, check_of, ok, unknown, warning
from dshealthd.doctor.job.agreement import INVARIANTS, OCCUPANCY
from dshealthd.doctor.job.sources import launcher_command, programs
from dshealthd.doctor.job.sources.fields import ManifestFields
from dshealthd.doctor.job.sources.launcher_command import SAVES
from dshealthd.doctor.job.sources.layout import Layout, torchrun
from dshealthd.doctor.job.sources.manifest import (
    CONTROLLERS,
    DEFAULT_SHARED,
    SHARED_MEMORY,
    Manifest,
    PodTemplate,
)
from dshealthd.doctor.job.sources.rendezvous import rendezvous
from dshealthd.doctor.job.start import Invariant, Start, broken, within
from dshealthd.jobs.environment import TIMEOUT, is_loopback, natural

if TYPE_CHECKING:
    from dshealthd.doctor.job.context import JobContext
    from dshealthd.doctor.job.sources.source import Source

_MPI = ("mpirun", "mpiexec")
_HOSTS = frozenset({"hostfile", "machinefile", "host", "H"})
"""Options of mpirun that say where it starts its processes, and how many."""
_PROGRAMS = frozenset({"torchrun", "deepspeed", "accelerate", "python", "python3"})
_REFERENCES = re.compile(r"(?<!\$)\$\((\w+)\)")
_OF_SHELLS = re.compile(r"(?<!\$)\$\{(\w+)\}")
_OF_PODS = re.compile(r"[a-z0-9][a-z0-9-]*-\d+")
"""Names that StatefulSets, indexed Jobs, JobSets and PyTorchJobs give their pods."""
_MESHES = {
    "Istio": ("istio-injection=enabled", "istio.io/rev", "sidecar.istio.io/inject"),
    "Linkerd": ("linkerd.io/inject=enabled", "linkerd.io/inject=ingress", "linkerd.io/inject"),
}
"""Meshes, the labels or annotations of a namespace by which they put a proxy into its pods, and
that of a pod, which decides.
"""
_FREE = frozenset({"rdma/ib", "vpc.amazonaws.com/efa"})
"""Network devices whose vendors' own examples need no IPC_LOCK: of CoreWeave and AWS."""
_RDMA = re.compile(r"rdma/.*|vpc\.amazonaws\.com/efa|networking\.gke\.io\.networks/rdma-.*")
"""Network devices as the plugins of NVIDIA (k8s-rdma-shared-dev-plugin, README), AWS and Google
name them.
"""
_LOCKS = frozenset({"IPC_LOCK", "CAP_IPC_LOCK", "ALL"})


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


def _manifest(_context: JobContext, source: Source[Manifest]) -> Iterator[Result]:
    if source.value is None:
        yield unknown(f"{source.name}: {source.problem}", component=source.name)
        return
    pods = source.value.pods
    found: dict[tuple[Invariant, str], list[PodTemplate]] = {}
    for pod in pods:
        rows = (*INVARIANTS, *OCCUPANCY, *NEEDS, *(OF_WHOLE if pod.is_whole else ()))
        for row, text in broken(start_of(pod, source.value), rows):
            found.setdefault((row, text), []).append(pod)
    for (row, text), ones in found.items():
        names = " and ".join(dict.fromkeys(one.name for one in ones))
        where = f"{ones[0].kind} {ones[0].job}, {names}"
        remedy = row.remedy if row in OF_WHOLE else ""
        yield row.make(f"{where}: {text}", remedy, component=row.component or names)
    if not found:
        gpus = sum(pod.count * pod.gpus for pod in pods)
        count = plural(sum(pod.count for pod in pods), "pod")
        yield ok(f"{source.name}: {count} with {plural(gpus, 'GPU')}")


def start_of(pod: PodTemplate, manifest: Manifest) -> PodStart:
    """Return what the pods of a template start."""
    layout, main = _layout(pod), pod.main
    with_gpus = [one for one in manifest.pods if one.gpus]
    alike = [one for one in with_gpus if one.object is pod.object and _waits(one, layout.nodes)]
    # others may be of the launch, too, or of another job
    least, most = (sum(one.count for one in some) for some in (alike, with_gpus))
    workers = min(max(layout.nodes or 0, least), most)
    is_first = alike[:1] == [pod] and (layout.nodes or 0) > 1
    memory = pod.limits.size("memory")
    probe, shared = main.at("livenessProbe"), pod.shared_memory
    ends = pod.kind.endswith(("Job", "JobSet", "Pod"))  # servers are another matter
    waits = probe.number("periodSeconds", 10) * probe.number("failureThreshold", 3)
    volume = pod.mounts.get(SHARED_MEMORY, (None, ManifestFields()))[1]
    in_memory = pod.gpus and volume.stated("emptyDir.medium") == "Memory"
    scheduling = pod.above.at("runPolicy", "schedulingPolicy")
    ranked = sum(one.count for one in manifest.pods if one.is_worker)
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
        more={
            "processes of a pod": natural(pod.processes),
            "patience": waits if probe and ends and pod.is_training and pod.gpus else None,
            "timeout": TIMEOUT,
            "shared memory": shared >> 20 if in_memory and shared and memory else None,
            "limit": (memory or 0) >> 20,
            "gang": natural(pod.above.text("minAvailable") or scheduling.text("minAvailable")),
            "pods": sum(one.count for one in manifest.pods),
            "processes of mpirun": _of_mpirun(pod) or None,
            "slots": (natural(pod.processes) or 1) * ranked,
        },
    )


def _waits(pod: PodTemplate, nodes: int | None) -> bool:
    """Return whether the pods start a torchrun that waits for so many nodes."""
    return bool(nodes) and _layout(pod).nodes == nodes


def _of_mpirun(pod: PodTemplate) -> int | None:
    """Return the processes that Open MPI refuses to start beyond the slots of the operator's
    hostfile; None where something else decides.
    """
    if pod.kind != "MPIJob" or pod.above.text("mpiImplementation") not in {"", "OpenMPI"}:
        return None
    text = " ".join((*pod.words, *pod.variables)).lower()
    for given in (one.options for one in pod.calls if one.program in _MPI):
        counts = [given[name][0] for name in given if name in {"np", "n", "c"}]
        count = natural("".join(counts[:1]))  # those behind may be of the program that it starts
        if count and "oversubscribe" not in text and not given.keys() & _HOSTS:
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
    return Layout(ranks_per_node=stated, source=pod.kind)


def _undefined(start: PodStart) -> Iterator[str]:
    """Yield a variable whose value refers to one that is not defined before it."""
    listed = [(one.text("name"), one.text("value")) for one in start.pod.main.each("env")]
    names = {name for name, _ in listed}
    before: set[str] = set()
    for name, value in listed:
        for other in _REFERENCES.findall(value):
            if other in names - before and other != name:
                why = f"is defined after it: $({other}) stays as it is"
                yield f"{name} refers to {other}, which {why}"
        for other in _OF_SHELLS.findall(value):
            if other in names and other != name:
                yield f"{name} has ${{{other}}} as it stands: Kubernetes expands $({other}) alone"
        before.add(name)


def _misread(start: PodStart) -> Iterator[str]:
    """Yield words that are not read as they are meant: without a shell nothing expands a variable
    or splits words, and a shell runs one word alone.
    """
    main = start.pod.main
    words = [str(word) for word in (*main.listed("command"), *main.listed("args"))]
    program = words[0] if words and main.get("command") else ""
    if start.pod.kind.startswith("Ray"):
        return  # KubeRay makes one text of command and args for a shell
    if len(program.split()) > 1 and not program.startswith("{"):
        yield f"no program is named {program[:60]!r}: each word of command needs an item of its own"
    if lost := programs.lost_words(words):
        yield f"bash -c runs {lost[:40]!r} alone: the words behind it are its $0, $1, ..."
    if program.rpartition("/")[2] in _PROGRAMS and not programs.runs_shell(words):
        own = {*CONTROLLERS, *start.variables}
        names = re.findall(r"(?<!\$)\$\{?([A-Za-z_]\w*)", " ".join(words))
        for name in itertools.islice(filter(own.__contains__, names), 1):  # not of a template
            yield f"no shell expands ${name} in command or args: write $({name})"


def _outputs(pod: PodTemplate) -> Iterator[tuple[str, str, str]]:
    """Yield the options that say where a training writes, each with its path and the mount there;
    empty where nothing is mounted.
    """
    words = [*pod.words, *(word for text in pod.words for word in text.split())]
    for option, path in launcher_command.outputs(words):
        above = (one for one in pod.mounts if path == one or path.startswith(f"{one}/"))
        yield option, path, max(above, key=len, default="")


def _written(start: PodStart) -> Iterator[str]:
    """Yield output of the training on a mount that is read-only."""
    for option, path, place in _outputs(start.pod):
        mount, volume = start.pod.mounts.get(place, (ManifestFields(), ManifestFields()))
        is_fixed = True in (mount.get("readOnly"), volume.stated("persistentVolumeClaim.readOnly"))
        if is_fixed:
            yield f"--{option} {path[:80]} cannot be written: {place} is mounted read-only"


def _lost(start: PodStart) -> Iterator[str]:
    """Yield where a training saves, though none of its volumes is there."""
    lasts = [at for at, (_, one) in start.pod.mounts.items() if "persistentVolumeClaim" in one]
    for option, path, place in _outputs(start.pod):
        if SAVES.search(option) and path.startswith("/") and lasts and not place:
            yield f"--{option} {path[:80]} is lost with its container: {lasts[0]} is what lasts"


def _behind_proxy(start: PodStart) -> Iterator[str]:
    pod = start.pod
    space = pod.object.at("metadata").get("namespace")
    spaces = (one.at("metadata") for one in start.manifest.of_kind("Namespace"))
    marks = _marks(next((one for one in spaces if one.get("name") == space), ManifestFields()))
    own = _marks(pod.template.at("metadata"))
    for mesh, (*switches, key) in _MESHES.items():
        pairs = (switch.partition("=") for switch in switches)
        is_on = any(
            marks.get(name) == value if value else name in marks for name, _, value in pairs
        )
        is_in = own.get(key, "true" if is_on else "false") in {"true", "enabled", "ingress"}
        if is_in and start.total > 1 and pod.is_training and pod.has_cluster_names:
            yield (
                f"{mesh} puts its sidecar into it: connections of the rendezvous and of NCCL go"
                " through a proxy, and ranks hang or are refused; a label of the pods opts out,"
                ' such as sidecar.istio.io/inject: "false"'
            )


def _marks(metadata: ManifestFields) -> Mapping[str, str]:
    """Return the labels and annotations of an object or template."""
    found = {**metadata.at("annotations").texts(), **metadata.at("labels").texts()}
    return {name: value.lower() for name, value in found.items()}


def _devices(start: PodStart) -> Iterator[str]:
    """Yield a network device that pods beside it or settings of NCCL need, or what it needs."""
    pod, devices = start.pod, start.pod.devices
    security = pod.main.at("securityContext")
    locks = {*map(str, security.at("capabilities").listed("add"))} & _LOCKS
    is_free = security.get("privileged") is True or not pod.gpus
    used = {one for one in devices if _RDMA.fullmatch(one)}
    if used - _FREE and not locks and not is_free:
        yield (
            "it has RDMA devices but not the capability IPC_LOCK: memory cannot be registered"
            " with them beyond the runtime's limit (memlock), often 8 MiB"
        )
    others = {
        device
        for one in start.alike
        for device in one.devices
        if one.gpus == pod.gpus and _RDMA.fullmatch(device)
    }
    if others and not devices and not is_free and not pod.spec.get("hostNetwork"):
        yield f"pods beside it have {min(others)}, but it has none: NCCL has no common network"


def _not_given(start: PodStart) -> Iterator[str]:
    pod, given = start.pod, start.pod.given
    text = "\n".join((*pod.words, *pod.variables.values()))
    if pod.main.listed("envFrom") or re.search(r"(?:^|[;&|\n])\s*(?:source|\.)\s", text):
        return  # what is elsewhere may set any
    tested = {CONTROLLERS.get(name) for name in re.findall(r"-[nz]\s+[\"']?\$\{?(\w+)", text)}
    for name in (
        dict.fromkeys(re.findall(r"\$[({]?(\w+)\b(?!:)", text)) if given is not None else ()
    ):
        is_set = name in (given or ()) or name in pod.variables
        is_set = is_set or re.search(rf"(?<![$\w-]){name}=", text) is not None
        if name in CONTROLLERS and not is_set and CONTROLLERS[name] not in tested:
            yield f"it uses {name}, which only {CONTROLLERS[name]} sets"


def _mounted(start: PodStart) -> Iterator[str]:
    pod = start.pod
    claims = {
        volume.at("persistentVolumeClaim").text("claimName") for volume in pod.volumes.values()
    }
    for claim in start.manifest.of_kind("PersistentVolumeClaim"):
        name, modes = claim.at("metadata").text("name"), claim.at("spec").listed("accessModes")
        is_of_one = modes in (["ReadWriteOnce"], ["ReadWriteOncePod"])
        if is_of_one and name in claims and pod.count > 1 and pod.gpus:
            yield f"the claim {name} is ReadWriteOnce, so only pods of one node can mount it"


def _unreachable(start: PodStart) -> Iterator[str]:
    """Yield why pods do not reach the address at which they meet."""
    pod, meeting = start.pod, rendezvous(start.pod.command, start.pod.variables)
    host, _, domain = meeting.address.partition(".")
    domain = domain.partition(".")[0]
    shown = f"{meeting.address[:80]} ({meeting.source})"
    is_one = start.torchrun is not None and start.torchrun.number("nnodes") == 1
    is_named = pod.command is not None and bool(_OF_PODS.fullmatch(host))
    joins = pod.meets_at_service and pod.name != "Master" and start.total > 1
    if pod.command and pod.count > 1 and is_loopback(meeting.address) and not is_one:
        yield f"{shown} is each pod's own loopback, but there are {pod.count} of them"
    if not pod.has_cluster_names and (is_named or (joins and not meeting.address)):
        shown = shown if is_named else f"the Service at which pods of a {pod.kind} meet"
        yield (
            f"{shown} does not resolve: a pod with hostNetwork resolves names of the cluster only"
            " with dnsPolicy: ClusterFirstWithHostNet"
        )
    names = [one.names for one in start.manifest.pods]
    of_pods = {name for one in names for name in one or ()}
    services = {one.at("metadata").text("name"): one for one in start.manifest.of_kind("Service")}
    if is_named and None not in names and host not in of_pods | services.keys():
        few = ", ".join(sorted(of_pods)[:4])
        yield f"MASTER_ADDR {shown} is no pod of this manifest, which has {few}"
    elif is_named and pod.names and pod.kind != "PyTorchJob" and domain != pod.domain:
        where = f"are in the subdomain {pod.domain}" if pod.domain else "have no subdomain"
        yield f"{shown} does not resolve: pods of this {pod.kind} {where}"
    if pod.domain and domain == pod.domain in services:
        yield from (f"{shown} does not resolve{why}" for why in _unserved(pod, services[domain]))


def _unserved(pod: PodTemplate, service: ManifestFields) -> Iterator[str]:
    """Yield why the Service of the pods' domain gives them no names."""
    spec, domain = service.at("spec"), pod.domain
    if spec.get("clusterIP") != "None":
        yield f": the Service {domain} is not headless"
    if pod.main.get("readinessProbe") and spec.get("publishNotReadyAddresses") is not True:
        yield (
            " until its pod is ready (readinessProbe), unless the Service"
            f" {domain} has publishNotReadyAddresses: true"
        )
    have = pod.template.at("metadata", "labels").texts()
    if pod.kind == "Job":
        have |= {"job-name": pod.job, "batch.kubernetes.io/job-name": pod.job}
    for name, value in spec.at("selector").texts().items():
        if have.get(name, value if "/" in name else "") != value:
            yield f": the Service {domain} selects {name}={value}, which these pods are not"


def _small(start: PodStart) -> Iterator[str]:
    pod, shared = start.pod, start.pod.shared_memory
    if pod.is_training and pod.gpus > 1 and shared is not None and shared <= DEFAULT_SHARED:
        yield (
            f"{SHARED_MEMORY} has {shared >> 20} MB, the default where nothing larger is mounted:"
            " too few for NCCL between GPUs of a pod and for data loaders"
        )


_WARNED = (
    ("checkpoint", "", _lost),
    ("sidecar", "", _behind_proxy),
    ("devices", "", _devices),
    ("persistentVolumeClaim", "", _mounted),
    (SHARED_MEMORY, f"volumes.emptyDir  # medium: Memory, at {SHARED_MEMORY}", _small),
    (SHARED_MEMORY, "", within(
        "shared memory", operator.le, "limit", f"{SHARED_MEMORY} may take {{0}} MiB, which count as"
        " memory of the container, limited to {1} MiB: it is killed for it")),
    ("livenessProbe", "containers.livenessProbe", within(
        "patience", operator.ge, "timeout", "the liveness probe kills a container that does not"
        " answer for {0} s, also while it loads or saves a checkpoint; collectives wait {1} s")),
)  # fmt: skip
_REFUSED = (
    ("command", _misread),
    ("command", _written),
    ("env", _not_given),
    ("env", _undefined),
    ("slotsPerWorker", within(
        "processes of mpirun", operator.le, "slots", "mpirun -np {0}, but workers have {1:slot}")),
    ("minAvailable", within(
        "gang", operator.le, "pods", "the job starts only once {0:pod} are placed (minAvailable),"
        " but has {1}")),
)  # fmt: skip
NEEDS = tuple(Invariant(find, name) for name, find in _REFUSED)
"""What the pods of a template need."""
OF_WHOLE = (
    Invariant(_unreachable, "MASTER_ADDR"),
    *(
        Invariant(
            find, name, "", f"kubectl explain pod.spec.{field}" if field else "", make=warning
        )
        for name, field, find in _WARNED
    ),
)
"""What they need that a patch of a template need not say."""
MANIFEST = check_of(
    lambda job: job.manifest,
    "no manifest is given (FILE)",
    "device-ordinal",
    "manifest",
    "Pods have a process for each GPU, shared memory, and can meet",
    _manifest,
)
