"""The networks of pods: their devices, and proxies between them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from dshealthd.doctor.job.sources.fields import ManifestFields

if TYPE_CHECKING:
    from dshealthd.doctor.job.pod_start import PodStart

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
_TAKE_DEVICES = {
    "FI_PROVIDER": "efa$",
    "NCCL_NET": r"(?i)(ib|aws libfabric)$",
    "NCCL_IB_HCA": r"[^^]",
}
"""Settings that choose a network which a container has only as a device of its own: of AWS
(docs.aws.amazon.com/eks, node-efa), of NCCL (docs.nvidia.com/deeplearning/nccl, env).
"""
_LOCKS = frozenset({"IPC_LOCK", "CAP_IPC_LOCK", "ALL"})


def behind_proxy(start: PodStart) -> Iterator[str]:
    """Yield the mesh whose proxy stands between pods."""
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


def devices(start: PodStart) -> Iterator[str]:
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


def settings(start: PodStart) -> Iterator[str]:
    """Yield a setting that takes a network device, where no pod has one."""
    pod = start.pod
    marks = " ".join(pod.template.at("metadata", "annotations").texts())
    mounts = [one.at("hostPath").text("path") for one in pod.volumes.values()]
    is_open = pod.spec.get("hostNetwork") or pod.spec.get("resourceClaims") or "networks" in marks
    is_open = is_open or pod.main.at("securityContext").get("privileged") is True
    has_devices = any(one.devices for one in start.alike)
    if has_devices or is_open or not pod.gpus or start.total == 1 or pod.main.get("envFrom"):
        return
    for name, pattern in _TAKE_DEVICES.items():
        value = pod.variables.get(name, "")
        if re.match(pattern, value) and not any(one.startswith("/dev") for one in mounts):
            yield (
                f"{name}={value[:40]} takes a network device, but the container asks for none"
                " beside its GPUs (resources.limits): NCCL finds no network, or takes TCP"
            )
            return
