"""A manifest of Kubernetes: the pods of a job, of any kind that has templates of pods.

A mapping with `containers` is a pod, wherever it stands, and `replicas` and `parallelism` above it
multiply: so Job, JobSet, PyTorchJob, MPIJob, RayJob and plain pods are read alike. The trainer of a
TrainJob and the groups of a LeaderWorkerSet are read by their own fields.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dshealthd.core.documents import MISSHAPEN
from dshealthd.doctor.job.sources import launcher_command
from dshealthd.jobs.environment import natural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.job.sources.launcher_command import LauncherCommand

MAX_BYTES = 1 << 18
"""Maximum bytes; objects in etcd have at most 1.5 MiB, and manifests by people a few KiB."""
MAX_PODS = 64
"""Maximum number of templates; jobs have two or three."""
_WITHOUT_OPERATOR = frozenset(
    {
        *("Pod", "Job", "CronJob", "Deployment", "StatefulSet", "ReplicaSet"),
        *("JobSet", "LeaderWorkerSet"),
    }
)
"""Kinds whose controllers set no variable that torchrun reads."""
_CONTAINERS = {
    "PyTorchJob": "pytorch",
    "TFJob": "tensorflow",
    "XGBoostJob": "xgboost",
    "PaddleJob": "paddle",
    "JAXJob": "jax",
}
"""The container that Kubeflow's training operator requires in the pods of its kinds, and whose
processes it has meet at the name of a Service (v1: pkg/webhooks/utils/utils.go, and before it
*_validation.go); MPI jobs meet in another way, and other operators have kinds of these names.
"""
_MESHES = {
    "Istio": ("istio-injection=enabled", "istio.io/rev", "sidecar.istio.io/inject"),
    "Linkerd": ("linkerd.io/inject=enabled", "linkerd.io/inject=ingress", "linkerd.io/inject"),
}
"""Meshes, the labels or annotations of a namespace by which they put a proxy into its pods, and
that of a pod, which decides.
"""
_PROGRAMS = frozenset({"torchrun", "deepspeed", "accelerate", "python", "python3"})
INDEX = "JOB_COMPLETION_INDEX"
CONTROLLERS = {
    **dict.fromkeys(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "a PyTorchJob"),
    INDEX: "completionMode: Indexed",
    **dict.fromkeys(
        ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"), "a LeaderWorkerSet"
    ),
}
"""Variables that controllers set in containers, and which of them."""
_UNLIMITED = frozenset({"rdma/ib"})
"""RDMA devices of CoreWeave, whose own examples need no IPC_LOCK; those of NVIDIA's device plugins
do (k8s-rdma-shared-dev-plugin, README).
"""
_ROOTS = re.compile(r"(?:^|[_-])(?:out|output|save|ckpt|checkpoints?|results?)(?:$|[_-])")
"""In an option that names where a training writes."""
_REFERENCE = re.compile(r"\$\((\w+)\)")
_SIZE = re.compile(r"(\d+)(?:\.\d+)?([kMGT]?)(i?)")
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a path of the pod; nothing is opened
QUEUE = "kueue.x-k8s.io/queue-name"
"""The label by which Kueue starts an object: of its own, not of its pods."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class PodTemplate:
    """Pods of a job that are made from one template, by their container with most GPUs."""

    kind: str
    """Of the object, such as `PyTorchJob`."""
    job: str
    """Name of the object, which is also its service's, if it has one."""
    name: str
    """What the template is of, such as `Worker`."""
    count: int
    """Pods that run at once; those of one group, if there are groups."""
    gpus: int
    """GPUs of a pod."""
    words: Sequence[str]
    """Command and arguments."""
    variables: Mapping[str, str]
    """Its environment; a `$` stands in what the manifest does not say."""
    shared_memory: int | None
    """Bytes at /dev/shm: 64 MiB by default, None without a limit."""
    memory: int | None
    """Bytes of memory that its container may use, if they are limited."""
    processes: str
    """Processes that the object states for a pod, as written; else empty."""
    is_worker: bool
    """Whether ranks of an MPIJob run in it."""
    patience: int | None
    """Seconds for which the liveness probe waits for an answer before the container is killed."""
    domain: str
    """Domain of the pods' own names; empty if they have none, or its controller chooses it."""
    has_cluster_names: bool
    """Whether it resolves names of the cluster."""
    joins_service: bool
    """Whether its operator has it meet the others at the name of a Service."""
    refused: Sequence[str]
    """What the API server refuses in it."""
    gang: int | None
    """Pods of all templates that are placed together or not at all."""
    image: str
    is_queued: bool
    """Whether a queue of Kueue that it names is one that Kueue reads."""
    claims: Sequence[str]
    """Claims of volumes that it mounts."""
    given: Sequence[str] | None
    """Variables that its controller sets; None if unknown."""
    replaces: bool
    """Whether a pod that fails is replaced."""
    members: Sequence[int | None]
    """Least and most pods of an elastic job, as the object says."""
    groups: int
    """Replicas of a job inside it: of a JobSet's."""
    proxy: str
    """The service mesh that puts a proxy into it."""
    misread: Sequence[str]
    """Words of its command that are not read as they are meant."""
    is_locked: bool
    """Whether it has RDMA devices, but may not lock memory for them."""
    labels: Mapping[str, str]
    awaits: bool
    """Whether it has no name until a probe says that it is ready."""

    @property
    def names(self) -> frozenset[str] | None:
        """The names of its pods; None where its controller invents them, or they are unknown."""
        each = range(min(self.count // max(self.groups, 1), 4096))
        if not self.job:
            return None
        if self.kind == "JobSet":
            outer = range(min(self.groups, 4096))
            return frozenset(f"{self.job}-{self.name}-{one}-{two}" for one in outer for two in each)
        first = {"Job": self.job, "StatefulSet": self.job}.get(self.kind)
        if self.kind == "PyTorchJob":
            first = f"{self.job}-{self.name.lower()}"
        return frozenset(f"{first}-{one}" for one in each) if first else None

    @property
    def command(self) -> LauncherCommand | None:
        """The launcher in the command, as far as known without a shell.

        Other controllers set variables that torchrun reads: options that are absent are unknown.
        """
        found = launcher_command.parse(self.words, self.variables, is_task=True)
        is_partial = self.kind not in _WITHOUT_OPERATOR
        return found and launcher_command.with_defaults(
            found, self.variables, is_partial=is_partial
        )

    @property
    def is_training(self) -> bool:
        """Whether it is known to train, by its command or its kind."""
        return self.command is not None or self.kind.removesuffix("Job") not in {"", self.kind}


@dataclass(frozen=True, slots=True)
class Manifest:
    """The pods of a manifest."""

    pods: tuple[PodTemplate, ...]
    of_one: tuple[str, ...] = ()
    """Claims that pods of one node alone can mount."""
    services: tuple[Mapping[str, Any], ...] = ()
    """Its services: `name`, `is_headless`, `is_early` and `selector`."""


def parse(text: str) -> dict[str, Any]:
    """Return the fields of a manifest, or as `accelerate` the settings of a configuration of
    Accelerate; ValueError if it is neither.
    """
    if settings := launcher_command.accelerate_settings(text):
        return {"accelerate": settings}
    import yaml

    pods: list[dict[str, Any]] = []
    claims: list[str] = []
    services: list[dict[str, Any]] = []
    spaces: dict[object, dict[str, str]] = {}
    try:
        for document in yaml.safe_load_all(text):
            if isinstance(document, dict):
                kind = str(document.get("kind", ""))
                if kind == "Namespace":
                    spaces[_of(document, "metadata").get("name")] = _marks(document)
                if kind == "Service":
                    services.append(_service(document))
                found = _pods(document, document, kind, 1)
                pods += itertools.islice(found, MAX_PODS - len(pods))
                if kind == "PersistentVolumeClaim" and _is_of_one(document):
                    claims.append(str(_of(document, "metadata").get("name")))
    except yaml.YAMLError as error:
        message = f"is not YAML: {' '.join(str(error).split())}"
        raise ValueError(message) from error
    except MISSHAPEN as error:
        message = f"has no fields of a Kubernetes manifest: {error}"
        raise ValueError(message) from error
    if not pods:
        message = "has no template of pods"
        raise ValueError(message)
    for pod in pods:
        pod["proxy"] = _proxy(spaces.get(pod.pop("space"), {}), pod.pop("marks"))
    return {"pods": pods, "of_one": claims, "services": services}


def _marks(node: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels and annotations of an object or template."""
    metadata = _of(node, "metadata")
    found = {**_of(metadata, "annotations"), **_of(metadata, "labels")}
    return {str(name): str(value).lower() for name, value in found.items()}


def _proxy(space: Mapping[str, str], own: Mapping[str, str]) -> str:
    """Return the mesh that puts a proxy into a pod with these marks, in such a namespace."""
    for mesh, (*switches, key) in _MESHES.items():
        pairs = (switch.partition("=") for switch in switches)
        is_on = any(
            space.get(name) == value if value else name in space for name, _, value in pairs
        )
        if own.get(key, "true" if is_on else "false") in {"true", "enabled", "ingress"}:
            return mesh
    return ""


def _service(document: Mapping[str, Any]) -> dict[str, Any]:
    spec = _of(document, "spec")
    return {
        "name": str(_of(document, "metadata").get("name")),
        "is_headless": spec.get("clusterIP") == "None",
        "is_early": spec.get("publishNotReadyAddresses") is True,
        "selector": {str(name): str(value) for name, value in _of(spec, "selector").items()},
    }


def _is_of_one(claim: Mapping[str, Any]) -> bool:
    """Return whether pods of one node alone can mount a claim."""
    return {*(claim.get("spec") or {}).get("accessModes", ())} in (
        {"ReadWriteOnce"},
        {"ReadWriteOncePod"},
    )


def _of(mapping: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """Return the mapping below these keys; empty where there is none."""
    for key in keys:
        mapping = mapping.get(key) or {}
    return mapping


def _pods(
    whole: Mapping[str, Any],
    node: Mapping[str, Any],
    name: str,
    count: int,
    *,
    above: Mapping[str, Any] = {},
    groups: int = 1,
) -> Iterator[dict[str, Any]]:
    if isinstance(node.get("containers"), list):
        yield {**_pod(whole, node, name, count), **_placed(whole, above, groups)}
        return
    if "resourcesPerNode" in node:  # of a TrainJob; its runtime has the template, with /dev/shm
        container = {**node, "resources": node["resourcesPerNode"]}
        pod = {"containers": [container], "hostIPC": True}
        found = _pod(whole, pod, name, _number(node, "numNodes", 1))
        yield {**found, **_placed(whole, {}, groups)}
        return
    parallelism = _number(node, "parallelism", 1)
    count *= _number(node, "replicas", 1)
    if whole.get("kind") == "JobSet":
        groups *= _number(node, "replicas", 1)
    count *= min(parallelism, _number(node, "completions", parallelism))
    if "workerTemplate" in node:  # replicas of a LeaderWorkerSet are groups of this size
        count = _number(node, "size", 1) - ("leaderTemplate" in node)
    for key, below in node.items():
        for one in below if isinstance(below, list) else [below]:
            if isinstance(one, dict):
                named = str(one.get("name") or key)
                inner = name if key in {"spec", "template"} else named
                many = 1 if key == "leaderTemplate" else count
                yield from _pods(whole, one, inner, many, above=node, groups=groups)


def _placed(whole: Mapping[str, Any], above: Mapping[str, Any], groups: int) -> dict[str, Any]:
    """Return what of a pod is said around its template."""
    return {
        "groups": groups,
        "space": _of(whole, "metadata").get("namespace"),
        "marks": _marks(above),
        "labels": {str(k): str(v) for k, v in _of(above, "metadata", "labels").items()},
    }


def _number(node: Mapping[str, Any], key: str, default: int) -> int:
    number = natural(str(node.get(key)))
    return default if number is None else number


def _pod(
    whole: Mapping[str, Any], spec: Mapping[str, Any], name: str, count: int
) -> dict[str, Any]:
    containers = [one for one in spec["containers"] if isinstance(one, dict)] or [{}]
    main = max(containers, key=lambda one: (_gpus(one), any(_asked(one))))
    above, kind = _of(whole, "spec"), str(whole.get("kind", ""))
    variables = {
        str(one.get("name")): str(one.get("value", f"${one.get('name')}"))
        for one in main.get("env") or ()
    }
    words = [
        _REFERENCE.sub(lambda match: variables.get(match[1], match[0]), str(word))
        for key in ("command", "args")
        for word in main.get(key) or ()
    ]
    probe, elastic = main.get("livenessProbe"), _of(above, "elasticPolicy")
    job = str(_of(whole, "metadata").get("name", ""))
    own = str(_of(above, "network").get("subdomain") or job) if kind == "JobSet" else ""
    has_own_dns = spec.get("dnsPolicy") in {"ClusterFirstWithHostNet", "None"}
    scheduling = _of(above, "runPolicy", "schedulingPolicy")
    never = kind.startswith("PyTorch") and spec.get("restartPolicy") == "Never"
    is_batch = _is_of(whole, "batch")
    stated = [above.get(key) for key in ("nprocPerNode", "slotsPerWorker")]
    stated.append(_of(above, "trainer").get("numProcPerNode"))
    policy = _of(above, "runPolicy") or above
    return {
        "kind": kind,
        "job": job,
        "name": name,
        "count": count,
        "gpus": _gpus(main),
        "words": words,
        "variables": variables,
        "shared_memory": _shared_memory(whole, spec, main),
        "memory": _bytes(_of(main, "resources", "limits").get("memory")),
        "processes": next((str(one) for one in stated if one), ""),
        "is_worker": name == "Worker" or above.get("runLauncherAsWorker") is True,
        "patience": _number(probe, "periodSeconds", 10) * _number(probe, "failureThreshold", 3)
        if probe
        else None,
        "domain": str(spec.get("subdomain") or above.get("serviceName") or own),
        "has_cluster_names": not spec.get("hostNetwork") or has_own_dns,
        "joins_service": bool(_required(whole)) and name != "Master",
        "refused": list(_refused(whole, spec, main)),
        "gang": natural(str(above.get("minAvailable") or scheduling.get("minAvailable"))),
        "claims": [
            str(_of(one, "persistentVolumeClaim").get("claimName"))
            for one in spec.get("volumes") or ()
        ],
        "given": _given(whole, above, kind, is_batch=is_batch),
        "image": str(main.get("image", "")),
        "is_queued": not kind.endswith(("Job", "JobSet"))
        or QUEUE in _of(whole, "metadata", "labels")
        or not any(QUEUE in labels for labels in _labels(above)),
        # KubeRay makes one text of command and args for a shell
        "misread": [] if kind.startswith("Ray") else list(_misread(main, spec)),
        "is_locked": _is_locked(main),
        "awaits": bool(main.get("readinessProbe")),
        "replaces": not never and ("podFailurePolicy" in above or policy.get("backoffLimit") != 0),
        "members": [natural(str(elastic.get(key))) for key in ("minReplicas", "maxReplicas")],
    }


def _misread(main: Mapping[str, Any], spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is not read as it is meant: without a shell nothing expands a variable or splits
    words, and a shell runs one word alone.
    """
    words = [str(word) for key in ("command", "args") for word in main.get(key) or ()]
    program = words[0] if words and main.get("command") else ""
    if len(program.split()) > 1 and not program.startswith("{"):
        yield f"no program is named {program[:60]!r}: each word of command needs an item of its own"
    if lost := launcher_command.lost_words(words):
        yield f"bash -c runs {lost[:40]!r} alone: the words behind it are its $0, $1, ..."
    if program.rpartition("/")[2] in _PROGRAMS and not launcher_command.runs_shell(words):
        own = {*CONTROLLERS, *(str(one.get("name")) for one in main.get("env") or ())}
        names = re.findall(r"(?<!\$)\$\{?([A-Za-z_]\w*)", " ".join(words))
        for name in itertools.islice(filter(own.__contains__, names), 1):  # not of a template
            yield f"no shell expands ${name} in command or args: write $({name})"
    volumes = {one.get("name"): one for one in spec.get("volumes") or ()}
    fixed = {
        str(one.get("mountPath"))
        for one in main.get("volumeMounts") or ()
        if one.get("readOnly") is True
        or _of(volumes, one.get("name"), "persistentVolumeClaim").get("readOnly") is True
        or volumes.get(one.get("name"), {}).keys() & {"configMap", "secret"}
    }
    written = [*words, *(word for text in words for word in text.split())]
    for option, path in launcher_command.pairs(written):
        inside = [one for one in fixed if path == one or path.startswith(f"{one.rstrip('/')}/")]
        if _ROOTS.search(option) and inside:
            yield f"--{option} {path[:80]} cannot be written: {inside[0]} is mounted read-only"
            return


def _given(
    whole: Mapping[str, Any], above: Mapping[str, Any], kind: str, *, is_batch: bool
) -> list[str] | None:
    """Return the variables that the controller of an object sets; None where they are unknown."""
    of = {
        "Job": "completionMode: Indexed" if above.get("completionMode") == "Indexed" else "",
        "JobSet": "completionMode: Indexed",
        "LeaderWorkerSet": "a LeaderWorkerSet",
        **dict.fromkeys(("Pod", "StatefulSet", "Deployment", "ReplicaSet"), ""),
    }
    if _required(whole) == "pytorch":
        of[kind] = "a PyTorchJob"
    if kind not in of or (kind == "Job" and not is_batch):
        return None
    return [name for name, controller in CONTROLLERS.items() if controller == of[kind]]


def _is_locked(main: Mapping[str, Any]) -> bool:
    """Return whether a container has RDMA devices, but no right to lock memory for them."""
    security = main.get("securityContext") or {}
    may = {*(_of(security, "capabilities").get("add") or ())} & {"IPC_LOCK", "CAP_IPC_LOCK", "ALL"}
    limits = _of(main, "resources", "limits")
    asked = {name for name in limits if name.startswith("rdma/") and natural(str(limits[name]))}
    has_rdma = bool(asked - _UNLIMITED)
    return has_rdma and not may and security.get("privileged") is not True


def _refused(
    whole: Mapping[str, Any], spec: Mapping[str, Any], main: Mapping[str, Any]
) -> Iterator[str]:
    """Yield what the API server refuses (its validation.go)."""
    if "image" not in main:
        return  # a patch, or a template that its operator completes
    required, names = _required(whole), [one.get("name") for one in spec["containers"]]
    if required and required not in names:
        yield f"no container is named {required!r}, as its operator requires"
    requests, limits = (_of(main, "resources", key) for key in ("requests", "limits"))
    for key in filter(_is_gpu, requests):
        if str(limits.get(key)) != str(requests[key]):
            yield f"{requests[key]} {key} in requests, but {limits.get(key, 'none')} in limits"
    for key in filter(_is_gpu, limits):
        if re.fullmatch(r"\d*\.\d*[1-9]\d*|\d+m", str(limits[key])):
            yield f"{limits[key]} {key} in limits is no whole number"
    for one in main.get("env") or ():
        if not isinstance(one.get("value", ""), str | None):
            yield f"the value of {one.get('name')} is {one['value']}, not a string: quote it"
    for key in ("command", "args"):
        for word in main.get(key) or ():
            if not isinstance(word, str):
                yield f"{word} in {key} is no string: quote it"
    masters = _of(whole, "spec", "pytorchReplicaSpecs", "Master").get("replicas", 1)
    if required and masters != 1:
        yield f"{masters} replicas of Master: there is one"
    policy = spec.get("restartPolicy", "Always")
    if _is_of(whole, "batch") and whole.get("kind") in {"Job", "CronJob"} and policy == "Always":
        yield "restartPolicy of a Job must be Never or OnFailure"
    volumes = {one.get("name") for one in spec.get("volumes") or ()} | {*_claims(whole)}
    for mount in main.get("volumeMounts") or ():
        if mount.get("name") not in volumes:
            yield f"the volume {mount.get('name')} of {mount.get('mountPath')} is not declared"


def _required(whole: Mapping[str, Any]) -> str:
    """Return the name of the container that an object's operator requires; empty for none."""
    return _CONTAINERS.get(str(whole.get("kind")), "") if _is_of(whole, "kubeflow.org") else ""


def _is_of(whole: Mapping[str, Any], group: str) -> bool:
    return str(whole.get("apiVersion", "batch/")).startswith(f"{group}/")


def _labels(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the labels of the templates below a mapping."""
    for key, value in node.items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict):
                yield from [_of(one, "labels")] if key == "metadata" else _labels(one)


def _claims(node: Mapping[str, Any], key: str = "") -> Iterator[str]:
    """Yield the names of the volumes that a controller makes from templates of claims."""
    for below, value in node.items():
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, dict):
                continue
            of_policy = below == "templates" and key == "volumeClaimPolicies"
            if below == "volumeClaimTemplates" or of_policy:
                yield str(_of(one, "metadata").get("name"))
            else:
                yield from _claims(one, below)


def _shared_memory(
    whole: Mapping[str, Any], spec: Mapping[str, Any], main: Mapping[str, Any]
) -> int | None:
    mounts = {one.get("mountPath"): one.get("name") for one in main.get("volumeMounts") or ()}
    if spec.get("hostIPC") or str(whole.get("kind")).startswith("Ray"):
        return None  # KubeRay mounts one itself (ray-operator, common/pod.go)
    if SHARED_MEMORY not in mounts:
        return 64 * MIB
    volumes = {one.get("name"): one for one in spec.get("volumes") or ()}
    return _bytes(_of(volumes, mounts[SHARED_MEMORY], "emptyDir").get("sizeLimit"))


def _bytes(quantity: object) -> int | None:
    """Return the bytes of a quantity; None without one."""
    match = _SIZE.fullmatch(str(quantity))
    unit = 1024 if match and match[3] else 1000
    return int(match[1]) * unit ** " kMGT".index(match[2] or " ") if match else None


def _is_gpu(resource: str) -> bool:
    return resource.endswith("/gpu")


def _asked(container: Mapping[str, Any]) -> Iterator[str]:
    """Yield how many GPUs of each kind a container asks for, as written."""
    asked = {**_of(container, "resources", "requests"), **_of(container, "resources", "limits")}
    yield from (str(value) for key, value in asked.items() if _is_gpu(key))


def _gpus(container: Mapping[str, Any]) -> int:
    return sum(natural(value) or 0 for value in _asked(container))


def from_json(document: dict[str, Any]) -> Manifest:
    """Return the manifest whose fields a JSON document has."""
    pods = tuple(PodTemplate(**pod) for pod in document["pods"])
    return Manifest(pods, *(tuple(document[key]) for key in ("of_one", "services")))
