"""The volumes of pods: what a training can write there, and whether it lasts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dshealthd.doctor.job.sources import launcher_command
from dshealthd.doctor.job.sources.fields import ManifestFields
from dshealthd.doctor.job.sources.manifest import DEFAULT_SHARED, SHARED_MEMORY, PodTemplate

if TYPE_CHECKING:
    from dshealthd.doctor.job.pod_start import PodStart

_FIXED = ("configMap", "secret", "projected", "downwardAPI", "image")
"""Kinds of volumes that are read-only (kubernetes.io/docs/concepts/storage/volumes)."""
_OF_POD = ("emptyDir", "ephemeral")
"""Kinds of volumes that are deleted with their pod (likewise)."""
_COPIES = re.compile(
    r"\b(?:cp|mv|rsync|rclone|aws|s5cmd|gsutil|gcloud|azcopy|mc|scp|push_to_hub)\b|://"
)
"""In a command that may copy what it saves to where it lasts."""


def _words(pod: PodTemplate) -> list[str]:
    """Return the words of a container's command, also of the text of a shell in it."""
    inner = list(pod.command.chain())[-1].arguments if pod.command else ()
    return [*pod.words, *(word for text in pod.words for word in text.split()), *inner]


def _outputs(pod: PodTemplate) -> Iterator[tuple[str, str, str]]:
    """Yield the options that say where a training writes, each with its path and the mount there;
    empty where nothing is mounted.
    """
    for option, path in dict.fromkeys(launcher_command.outputs(_words(pod))):
        above = (one for one in pod.mounts if path == one or path.startswith(f"{one}/"))
        yield option, path, max(above, key=len, default="")


def unwritable(start: PodStart) -> Iterator[str]:
    """Yield output of the training where its container cannot write."""
    pod = start.pod
    is_closed = pod.main.at("securityContext").get("readOnlyRootFilesystem") is True
    for option, path, place in _outputs(pod):
        mount, volume = pod.mounts.get(place, (ManifestFields(), ManifestFields()))
        is_fixed = True in (mount.get("readOnly"), volume.stated("persistentVolumeClaim.readOnly"))
        kind = next((f"a {one}" for one in _FIXED if one in volume), "")
        if is_fixed or kind:
            why = kind or "mounted read-only"
            yield f"--{option} {path[:80]} cannot be written: {place} is {why}"
        elif is_closed and not place and path.startswith("/"):
            yield f"--{option} {path[:80]} cannot be written: readOnlyRootFilesystem is true"


def lost(start: PodStart) -> Iterator[str]:
    """Yield where a training saves, though none of its volumes is there, or one of its pod."""
    pod = start.pod
    lasts = [at for at, (_, one) in pod.mounts.items() if "persistentVolumeClaim" in one]
    saves = {option for option, _ in launcher_command.saves(_words(pod))}
    text = " ".join(pod.words)
    for option, path, place in _outputs(pod):
        _, volume = pod.mounts.get(place, (None, ManifestFields()))
        kind = next((one for one in _OF_POD if one in volume), "")
        if option not in saves or not path.startswith("/"):
            continue
        if lasts and not place:
            yield f"--{option} {path[:80]} is lost with its container: {lasts[0]} is what lasts"
        elif kind and pod.gpus and not _COPIES.search(text) and not _is_shared(pod, place):
            yield f"--{option} {path[:80]} is lost with its pod: {place} is of kind {kind}"


def _is_shared(pod: PodTemplate, place: str) -> bool:
    """Return whether another container has the volume that is mounted there, and may copy it."""
    name = pod.mounts[place][0].get("name")
    every = [*pod.spec.each("containers"), *pod.spec.each("initContainers")]
    others = [one for one in every if one.value is not pod.main.value]
    return any(name == two.get("name") for one in others for two in one.each("volumeMounts"))


def of_one_node(start: PodStart) -> Iterator[str]:
    """Yield a claim that pods of several nodes cannot mount."""
    pod = start.pod
    claims = {
        volume.at("persistentVolumeClaim").text("claimName") for volume in pod.volumes.values()
    }
    for claim in start.manifest.of_kind("PersistentVolumeClaim"):
        name, modes = claim.at("metadata").text("name"), claim.at("spec").listed("accessModes")
        is_of_one = modes in (["ReadWriteOnce"], ["ReadWriteOncePod"])
        if is_of_one and name in claims and pod.count > 1 and pod.gpus:
            yield f"the claim {name} is ReadWriteOnce, so only pods of one node can mount it"


def small(start: PodStart) -> Iterator[str]:
    """Yield shared memory that is too small for several GPUs."""
    pod, shared = start.pod, start.pod.shared_memory
    if pod.is_training and pod.gpus > 1 and shared is not None and shared <= DEFAULT_SHARED:
        yield (
            f"{SHARED_MEMORY} has {shared >> 20} MB, the default where nothing larger is mounted:"
            " too few for NCCL between GPUs of a pod and for data loaders"
        )
