"""A manifest of Kubernetes: the pods of a job, of any kind that has templates of pods.

A mapping with `containers` is a pod, wherever it stands, and `replicas` and `parallelism` above it
multiply: so Job, JobSet, PyTorchJob, MPIJob and plain pods are read alike.
"""

from __future__ import annotations

import itertools
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
    gpus: int
    """GPUs of a pod."""
    words: Sequence[str]
    """Command and arguments."""
    variables: Mapping[str, str]
    """Its environment, as far as it is written there."""
    has_shared_memory: bool
    """Whether something other than the container runtime's default is at /dev/shm."""
    processes: str
    """`nprocPerNode` or `slotsPerWorker` of the object, as written; else empty."""

    @property
    def command(self) -> LauncherCommand | None:
        """The launcher in the command, as far as known without a shell."""
        return launcher_command.parse(self.words, self.variables)


def parse(text: str) -> list[dict[str, Any]]:
    """Return the fields of the templates in a manifest; ValueError if it is none."""
    import yaml

    found: list[dict[str, Any]] = []
    try:
        for document in yaml.safe_load_all(text):
            if isinstance(document, dict):
                pods = _pods(document, document, str(document.get("kind", "")), 1)
                found += itertools.islice(pods, MAX_PODS - len(found))
    except yaml.YAMLError as error:
        message = f"is not YAML: {' '.join(str(error).split())}"
        raise ValueError(message) from error
    except MISSHAPEN as error:
        message = f"has no fields of a Kubernetes manifest: {error}"
        raise ValueError(message) from error
    if not found:
        message = "has no template of pods"
        raise ValueError(message)
    return found


def _pods(
    whole: Mapping[str, Any], node: Mapping[str, Any], name: str, count: int
) -> Iterator[dict[str, Any]]:
    if isinstance(node.get("containers"), list):
        yield _pod(whole, node, name, count)
        return
    for key in ("replicas", "parallelism"):
        number = natural(str(node.get(key, 1)))
        count *= 1 if number is None else number
    for key, below in node.items():
        for one in below if isinstance(below, list) else [below]:
            if isinstance(one, dict):
                named = str(one.get("name") or key)
                inner = name if key in {"spec", "template"} else named
                yield from _pods(whole, one, inner, count)


def _pod(
    whole: Mapping[str, Any], spec: Mapping[str, Any], name: str, count: int
) -> dict[str, Any]:
    containers = [one for one in spec["containers"] if isinstance(one, dict)] or [{}]
    main = max(containers, key=_gpus)
    words = [str(word) for key in ("command", "args") for word in main.get(key) or ()]
    mounts = {str(one.get("mountPath")) for one in main.get("volumeMounts") or ()}
    above = whole.get("spec") or {}
    return {
        "kind": str(whole.get("kind", "")),
        "job": str((whole.get("metadata") or {}).get("name", "")),
        "name": name,
        "count": count,
        "gpus": _gpus(main),
        "words": words,
        "variables": {
            str(one.get("name")): str(one["value"])
            for one in main.get("env") or ()
            if "value" in one
        },
        # A path of the pod that a manifest names; nothing is opened.
        "has_shared_memory": "/dev/shm" in mounts or bool(spec.get("hostIPC")),  # noqa: S108
        "processes": str(above.get("nprocPerNode") or above.get("slotsPerWorker") or ""),
    }


def _gpus(container: Mapping[str, Any]) -> int:
    resources = container.get("resources") or {}
    limits = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
    return sum(natural(str(value)) or 0 for key, value in limits.items() if key.endswith("/gpu"))


def from_json(documents: Sequence[dict[str, Any]]) -> tuple[PodTemplate, ...]:
    """Return the templates whose fields JSON documents have."""
    return tuple(PodTemplate(**document) for document in documents)
