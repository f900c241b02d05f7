"""The pods of a manifest have as many processes as GPUs, what ranks need, and can meet."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dshealthd.core.text import plural
from dshealthd.doctor.check import Result, check_of, ok, unknown, warning
from dshealthd.doctor.job import networks, volumes
from dshealthd.doctor.job.agreement import INVARIANTS, OCCUPANCY
from dshealthd.doctor.job.pod_start import PodStart, start_of, waits
from dshealthd.doctor.job.sources import programs
from dshealthd.doctor.job.sources.manifest import (
    CONTROLLERS,
    SHARED_MEMORY,
    Manifest,
    PodTemplate,
)
from dshealthd.doctor.job.sources.rendezvous import rendezvous
from dshealthd.doctor.job.start import Invariant, broken, within
from dshealthd.jobs.environment import is_loopback

if TYPE_CHECKING:
    from dshealthd.doctor.job.context import JobContext
    from dshealthd.doctor.job.sources.fields import ManifestFields
    from dshealthd.doctor.job.sources.source import Source

_GPUS = "rayStartParams.num-gpus is {0}, but the pod has {1:GPU}: Ray"
_WARNED = (
    ("num-gpus", "", within("GPUs of Ray", operator.ge, "GPUs", f"{_GPUS} leaves the others idle")),
    ("num-gpus", "", within(
        "GPUs of Ray", operator.le, "GPUs", f"{_GPUS} starts workers without one")),
    ("terminationGracePeriodSeconds", "lifecycle", within(
        "grace", operator.gt, "hook", "preStop waits for {1} s of the {0} s of"
        " terminationGracePeriodSeconds: the training is killed before it is told to stop")),
    ("checkpoint", "", volumes.lost),
    ("sidecar", "", networks.behind_proxy),
    ("devices", "", networks.devices),
    ("devices", "", networks.settings),
    ("persistentVolumeClaim", "", volumes.of_one_node),
    (SHARED_MEMORY, f"volumes.emptyDir  # medium: Memory, at {SHARED_MEMORY}", volumes.small),
    (SHARED_MEMORY, "", within(
        "shared memory", operator.le, "limit", f"{SHARED_MEMORY} may take {{0}} MiB, which count as"
        " memory of the container, limited to {1} MiB: it is killed for it")),
    ("livenessProbe", "containers.livenessProbe", within(
        "patience", operator.ge, "timeout", "the liveness probe kills a container that does not"
        " answer for {0} s, also while it loads or saves a checkpoint; collectives wait {1} s")),
)  # fmt: skip
"""What is wrong with pods that start all the same: a component, a field, and what is found."""
_OF_ONE_LAUNCH = frozenset({"LeaderWorkerSet", "PyTorchJob"})
"""Kinds whose pods are one launch, of as many nodes as only their controller knows."""
_PROGRAMS = frozenset({"torchrun", "deepspeed", "accelerate", "python", "python3"})
_REFERENCES = re.compile(r"(?<!\$)\$\((\w+)\)")
_OF_SHELLS = re.compile(r"(?<!\$)\$\{(\w+)\}")
_OF_PODS = re.compile(r"[a-z0-9][a-z0-9-]*-\d+")
"""Names that StatefulSets, indexed Jobs, JobSets and PyTorchJobs give their pods."""


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


def _agree(start: PodStart) -> Iterator[str]:
    """Yield in what templates of one launch differ, so that their pods never meet."""
    counted = _option(start.pod, "nnodes")
    pod, nodes = start.pod, start.layout.nodes
    ones = [
        one
        for one in start.alike
        if (waits(one, nodes) and one.count < (nodes or 1))
        or (nodes is None and one.kind in _OF_ONE_LAUNCH and _option(one, "nnodes") == counted)
    ]
    if start.torchrun is None or pod not in ones:
        return
    places = [(one, rendezvous(one.command, one.variables)) for one in ones]
    stated = {
        "port": [(one, str(at.port or "")) for one, at in places],
        **{
            f"--{name}": [(one, _option(one, name)) for one in ones]
            for name in ("rdzv-id", "rdzv-backend")
        },
    }
    for name, values in stated.items():
        known = {text: one.name for one, text in values if text and "$" not in text}
        if len(known) > 1:
            shown = " but ".join(f"{text[:40]} in {where}" for text, where in known.items())
            yield f"{name} is {shown}: pods of one launch never meet"


def _apart(start: PodStart) -> Iterator[str]:
    """Yield a torchrun that meets within its own pod, though the pods are one launch."""
    inner, pods = start.torchrun, sum(one.count for one in start.alike if one.gpus)
    if inner is None or start.pod.kind not in _OF_ONE_LAUNCH or pods == 1:
        return
    if "standalone" in inner.options or start.layout.nodes == 1:
        option = "--standalone" if "standalone" in inner.options else "--nnodes=1"
        yield f"torchrun {option} meets within its pod: each of {pods} trains by itself"


def _option(pod: PodTemplate, name: str) -> str:
    """Return an option of the pod's torchrun; empty without one."""
    inner = pod.command.find("torchrun") if pod.command else None
    return inner.options.get(name, "") if inner else ""


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


_REFUSED = (
    ("command", _misread),
    ("command", volumes.unwritable),
    ("env", _not_given),
    ("env", _undefined),
    ("rendezvous", _agree),
    ("rendezvous", _apart),
    ("slotsPerWorker", within(
        "processes of the operator's hosts", operator.le, "slots",
        "mpirun -np {0}, but workers have {1:slot}")),
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
