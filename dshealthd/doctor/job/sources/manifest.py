"""A manifest of Kubernetes: the pods of a job, of any kind that has templates of pods.

A mapping with `containers` is a pod, wherever it stands, and `replicas` and `parallelism` above it
multiply: so Job, JobSet, PyTorchJob, MPIJob, RayJob and plain pods are read alike. The trainer of a
TrainJob and the groups of a LeaderWorkerSet are read by their own fields.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dshealthd.core.documents import MISSHAPEN
from dshealthd.doctor.job.sources import launcher_command
from dshealthd.doctor.job.sources.calls import Call, calls
from dshealthd.doctor.job.sources.fields import ManifestFields, plain
from dshealthd.doctor.job.sources.shell import ShellCommand
from dshealthd.jobs.environment import natural

if TYPE_CHECKING:
    from dshealthd.doctor.job.sources.launcher_command import LauncherCommand

MAX_PODS = 64
"""Maximum number of templates; jobs have two or three."""
MAX_NAMES = 4096
"""Maximum number of pods of a template whose names are made."""
_WITHOUT_OPERATOR = frozenset(
    {
        *("Pod", "Job", "CronJob", "Deployment", "StatefulSet", "ReplicaSet"),
        *("JobSet", "LeaderWorkerSet"),
    }
)
"""Kinds whose controllers set no variable that torchrun reads."""
_OF_KUBEFLOW = frozenset({"PyTorchJob", "TFJob", "XGBoostJob", "PaddleJob", "JAXJob"})
"""Kinds whose processes Kubeflow's training operator has meet at the name of a Service; MPI jobs
meet in another way, and other operators have kinds of these names.
"""
INDEX = "JOB_COMPLETION_INDEX"
CONTROLLERS = {
    **dict.fromkeys(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "a PyTorchJob"),
    INDEX: "completionMode: Indexed",
    **dict.fromkeys(
        ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"), "a LeaderWorkerSet"
    ),
    **dict.fromkeys(launcher_command.OF_SLURM, "Slurm"),
}
"""Variables that controllers set in containers, and which of them."""
_REFERENCE = re.compile(r"\$\((\w+)\)")
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a path of the pod; nothing is opened
DEFAULT_SHARED = 64 << 20
"""Bytes there where nothing is mounted."""
_OF_NODE = re.compile(r"cpu|memory|ephemeral-storage|(hugepages|requests|limits)\b.*")
"""Resources that are no devices."""


@dataclass(frozen=True)
class PodTemplate:
    """Pods of a job that are made from one template, by their container with most GPUs."""

    object: ManifestFields
    """The object whose controller makes them."""
    template: ManifestFields
    """What has their labels and annotations."""
    spec: ManifestFields
    name: str
    """What the template is of, such as `Worker`."""
    count: int
    """Pods that run at once; those of one group, if there are groups."""
    groups: int = 1
    """Replicas of a job inside it: of a JobSet's."""
    inside: tuple[ManifestFields, ...] = ()
    """The parts of the object that it stands in, from the outermost in."""

    @property
    def kind(self) -> str:
        """The kind of the object, such as `PyTorchJob`."""
        return self.object.text("kind")

    @property
    def job(self) -> str:
        """The name of the object, which is also its service's, if it has one."""
        return self.object.at("metadata").text("name")

    @property
    def above(self) -> ManifestFields:
        """The specification of the object."""
        return self.object.at("spec")

    @cached_property
    def main(self) -> ManifestFields:
        """The container with most GPUs."""
        containers = self.spec.each("containers")  # which every template has
        return max(containers, key=lambda one: (sum(_gpus(one)), bool(_gpus(one))))

    @property
    def is_whole(self) -> bool:
        """Whether it is no patch, and no other template, as that of a TrainJob's runtime, completes
        it.
        """
        return "image" in self.main and self.kind != "TrainJob"

    @property
    def gpus(self) -> int:
        """GPUs of a pod."""
        return sum(_gpus(self.main))

    @property
    def limits(self) -> ManifestFields:
        """The resources to which the container is limited."""
        return self.main.at("resources", "limits")

    @property
    def devices(self) -> frozenset[str]:
        """The devices besides GPUs that it asks for."""
        asked = self.limits.value
        return frozenset(one for one in asked if not is_gpu(one) and not _OF_NODE.fullmatch(one))

    @cached_property
    def variables(self) -> Mapping[str, str]:
        """Its environment; a `$` stands in what the manifest does not say."""
        return {
            one.text("name"): one.text("value") if "value" in one else f"${one.text('name')}"
            for one in self.main.each("env")
        }

    @cached_property
    def words(self) -> list[str]:
        """Command and arguments."""
        return [
            _REFERENCE.sub(lambda match: self.variables.get(match[1], match[0]), str(word))
            for word in (*self.main.listed("command"), *self.main.listed("args"))
        ]

    @property
    def shared_memory(self) -> int | None:
        """Bytes at /dev/shm: 64 MiB by default, None without a limit."""
        if self.spec.get("hostIPC") or self.kind.startswith("Ray"):
            return None  # KubeRay mounts one itself (ray-operator, common/pod.go)
        if SHARED_MEMORY not in self.mounts:
            return DEFAULT_SHARED
        return self.mounts[SHARED_MEMORY][1].at("emptyDir").size("sizeLimit")

    @cached_property
    def volumes(self) -> dict[str, ManifestFields]:
        """The volumes that it may mount, by name."""
        return {one.text("name"): one for one in self.spec.each("volumes")}

    @cached_property
    def mounts(self) -> dict[str, tuple[ManifestFields, ManifestFields]]:
        """What is mounted in the container, by path, each with its volume."""
        mounts = ((one.text("mountPath"), one) for one in self.main.each("volumeMounts"))
        none = ManifestFields()
        return {
            path.rstrip("/"): (one, self.volumes.get(one.text("name"), none))
            for path, one in mounts
        }

    @property
    def deadline(self) -> int | None:
        """Seconds after which its controller ends it, if there is a limit."""
        parts = (self.spec, *self.inside, self.above.at("runPolicy"))
        found = [natural(one.text("activeDeadlineSeconds")) for one in parts]
        return min(filter(None, found), default=None)

    @property
    def gpus_of_ray(self) -> int | None:
        """GPUs that Ray is told to count in it; None where KubeRay reads them from the limits
        (ray-operator, common/pod.go, generateRayStartCommand).
        """
        told = [natural(one.at("rayStartParams").text("num-gpus")) for one in self.inside]
        return next(filter(None, told), None)

    @property
    def before_stop(self) -> int:
        """Seconds that its hook waits before the training is told to stop."""
        hook = self.main.at("lifecycle", "preStop")
        words = " ".join(map(str, hook.at("exec").listed("command")))
        waits = map(natural, re.findall(r"\bsleep\s+(\d+)\b", words))
        return sum(filter(None, waits)) or hook.at("sleep").number("seconds", 0)

    @property
    def processes(self) -> str:
        """Processes that the object states for a pod, as written; else empty."""
        stated = (self.above.text("nprocPerNode"), self.above.text("slotsPerWorker"))
        return next(filter(None, stated), self.above.at("trainer").text("numProcPerNode"))

    @property
    def is_worker(self) -> bool:
        """Whether ranks of an MPIJob run in it."""
        return self.name == "Worker" or self.above.get("runLauncherAsWorker") is True

    @property
    def domain(self) -> str:
        """Domain of the pods' own names; empty if they have none, or its controller chooses it."""
        network = self.above.at("network")
        own = (
            ""
            if network.get("enableDNSHostnames") is False
            else network.text("subdomain") or self.job
        )
        return (
            self.spec.text("subdomain")
            or self.above.text("serviceName")
            or own * (self.kind == "JobSet")
        )

    @property
    def has_cluster_names(self) -> bool:
        """Whether it resolves names of the cluster."""
        own = self.spec.get("dnsPolicy") in ("ClusterFirstWithHostNet", "None")
        return own or not self.spec.get("hostNetwork")

    @property
    def meets_at_service(self) -> bool:
        """Whether Kubeflow's training operator has its processes meet at the name of a Service."""
        return self.kind in _OF_KUBEFLOW and self.is_of("kubeflow.org")

    @property
    def given(self) -> Iterable[str] | None:
        """Variables that its controller sets; None if unknown."""
        is_indexed = self.above.get("completionMode") == "Indexed"
        of = {
            "Job": ("completionMode: Indexed",) if is_indexed else (),
            "JobSet": ("completionMode: Indexed",),
            "LeaderWorkerSet": ("a LeaderWorkerSet",),
            **dict.fromkeys(("Pod", "StatefulSet", "Deployment", "ReplicaSet"), ()),
        }
        if self.kind == "PyTorchJob" and self.meets_at_service:
            of[self.kind] = ("a PyTorchJob",)
        if self.kind not in of or (self.kind == "Job" and not self.is_of("batch")):
            return None
        return {name for name, one in CONTROLLERS.items() if one in of[self.kind]}

    def is_of(self, group: str) -> bool:
        """Return whether the object is of a group of the API."""
        return (self.object.text("apiVersion") or "batch/").startswith(f"{group}/")

    @property
    def names(self) -> frozenset[str] | None:
        """The names of its pods; None where its controller invents them, or they are unknown or too
        many.
        """
        each = range(self.count // max(self.groups, 1))
        is_strange = self.kind == "Job" and not self.is_of("batch")
        if not self.job or is_strange or self.count > MAX_NAMES:
            return None
        if self.kind == "JobSet":
            outer = range(self.groups)
            return frozenset(f"{self.job}-{self.name}-{one}-{two}" for one in outer for two in each)
        first = {"Job": self.job, "StatefulSet": self.job}.get(self.kind)
        if self.kind == "PyTorchJob":
            first = f"{self.job}-{self.name.lower()}"
        return frozenset(f"{first}-{one}" for one in each) if first else None

    @cached_property
    def command(self) -> LauncherCommand | None:
        """The launcher in the command, as far as known without a shell.

        Other controllers set variables that torchrun reads: options that are absent are unknown.
        """
        found = launcher_command.parse(self.words, self.variables, is_task=True)
        is_partial = self.kind not in _WITHOUT_OPERATOR
        return found and launcher_command.with_defaults(
            found, self.variables, is_partial=is_partial
        )

    @cached_property
    def calls(self) -> Sequence[Call]:
        """The calls of other programs in its command."""
        return list(calls([ShellCommand(tuple(self.words))]))

    @property
    def is_training(self) -> bool:
        """Whether it is known to train, by its command or its kind."""
        return self.command is not None or self.kind.removesuffix("Job") not in {"", self.kind}


@dataclass(frozen=True)
class Manifest:
    """The pods of a manifest, and its other objects."""

    pods: tuple[PodTemplate, ...]
    objects: tuple[ManifestFields, ...] = ()

    def of_kind(self, kind: str) -> Iterator[ManifestFields]:
        """Yield the objects of a kind."""
        return (one for one in self.objects if one.get("kind") == kind)


def parse(text: str) -> dict[str, Any]:
    """Return the documents of a manifest, or as `accelerate` the settings of a configuration of
    Accelerate; ValueError if it is neither.
    """
    if settings := launcher_command.accelerate_settings(text):
        return {"accelerate": settings}
    import yaml

    try:
        found = {"documents": plain(list(yaml.safe_load_all(text)))}
    except yaml.YAMLError as error:
        raise ValueError(f"is not YAML: {' '.join(str(error).split())}") from error
    except MISSHAPEN as error:
        raise ValueError(f"has no fields of a Kubernetes manifest: {error}") from error
    if not from_json(found).pods:
        raise ValueError("has no template of pods")
    return found


def from_json(document: dict[str, Any]) -> Manifest:
    """Return the manifest whose documents a JSON document has."""
    objects = tuple(itertools.chain.from_iterable(map(_objects, document["documents"])))
    pods = itertools.chain.from_iterable(_pods(one, one, one.text("kind")) for one in objects)
    return Manifest(tuple(itertools.islice(pods, MAX_PODS)), objects)


def _objects(document: object) -> list[ManifestFields]:
    """Return the objects of a document, which may be a list of them."""
    whole = ManifestFields(document)
    return whole.each("items") if whole.text("kind").endswith("List") else [whole]


def _pods(
    whole: ManifestFields,
    node: ManifestFields,
    name: str,
    count: int = 1,
    groups: int = 1,
    above: tuple[ManifestFields, ...] = (),
) -> Iterator[PodTemplate]:
    no_fields = (ManifestFields(),)
    if node.each("containers"):
        yield PodTemplate(whole, (above or no_fields)[-1], node, name, count, groups, above)
        return
    if whole.get("kind") == "TrainJob" and name == "trainer":
        container = {**node.value, "resources": node.get("resourcesPerNode")}
        spec = ManifestFields({"containers": [container]})
        yield PodTemplate(whole, ManifestFields(), spec, name, node.number("numNodes", 1), groups)
        return
    parallelism, replicas = node.number("parallelism", 1), node.number("replicas", 1)
    groups *= replicas if whole.get("kind") == "JobSet" else 1
    count *= replicas * min(parallelism, node.number("completions", parallelism))
    if "workerTemplate" in node:  # replicas of a LeaderWorkerSet are groups of this size
        count = node.number("size", 1) - ("leaderTemplate" in node)
    for key, below in node.below():
        inner = name if key in {"spec", "template"} else below.text("name") or key
        many = 1 if key == "leaderTemplate" else count
        yield from _pods(whole, below, inner, many, groups, (*above, node))


def is_gpu(resource: str) -> bool:
    """Return whether a resource is GPUs, of any vendor."""
    return resource.endswith("/gpu")


def _gpus(container: ManifestFields) -> list[int]:
    """Return how many GPUs of each kind a container asks for; 0 for what is no number."""
    asked = {key: container.at("resources", key).texts() for key in ("requests", "limits")}
    both = {**asked["requests"], **asked["limits"]}
    return [natural(value) or 0 for key, value in both.items() if is_gpu(key)]
