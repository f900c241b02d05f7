"""The context of a node's checks: configuration, status document, the node's hardware."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dshealthd.core import schema
from dshealthd.findings.finding import Finding
from dshealthd.findings.series import Series, of_document

if TYPE_CHECKING:
    from dshealthd.config.config import Config  # noqa: TC004 - nothing evaluates this type
    from dshealthd.core.host import Host

_VERSIONS = ("driver", "cuda", "nvml")


@dataclass(frozen=True)
class NodeContext:
    """A node's configuration and its last status."""

    config: Config
    document: Mapping[str, Any] = field(default_factory=dict)
    """The status document (docs/status-api.md), from the agent or from a collection by the doctor.

    Empty for checks that need none.
    """
    several: bool = False
    """Whether jobs of this node run across nodes: other nodes must then reach it by its name."""
    broken: tuple[str, ...] = ()
    """Errors of the installed configuration, each with its file; defaults stand for what they name.
    """
    python: tuple[str, ...] = ()
    """Interpreters or prefixes of training environments."""

    def with_document(self, document: Mapping[str, Any]) -> NodeContext:
        """Return the same context with a status document, parsed once for all checks."""
        made = dataclasses.replace(self, document=document)
        _ = (
            made.series,
            made.collectors,
            made.findings,
        )  # cached, so that no check's process parses it again
        return made

    @property
    def host(self) -> Host:
        """The roots of the file systems that describe the node that is checked."""
        return self.config.path.host

    @cached_property
    def series(self) -> Series:
        """All samples of the status document, for a node's checks."""
        return of_document(self.document)

    @cached_property
    def collectors(self) -> dict[str, Mapping[str, Any]]:
        """The document's collectors by name, with state, reason, detail and faults."""
        return {one["name"]: one for one in self.document.get("collectors", ())}

    @cached_property
    def findings(self) -> dict[str, list[Finding]]:
        """The document's `findings`, and those that are `watched`."""
        kind = schema.of(list[Finding])
        return {
            name: kind.read(self.document.get(name, []), name) for name in ("findings", "watched")
        }

    @property
    def has_gpus(self) -> bool:
        """Whether GPUs are known to be on the PCI bus or in NVML."""
        expected = self.series.value("gpus_expected") or 0
        return expected > 0 or (self.series.value("gpus_visible") or 0) > 0

    @property
    def has_infiniband(self) -> bool:
        """Whether there is an InfiniBand or RoCE port."""
        return any(self.series("infiniband_port_up"))


def facts(context: NodeContext) -> dict[str, str]:
    """Return this node's versions, devices and settings, which all nodes of a job must share."""
    series = context.series
    found = {"kernel": os.uname().release, "architecture": os.uname().machine}
    for point in series("gpu_driver_info"):
        found |= {f"gpu {name}": point.labels.get(name, "unknown") for name in _VERSIONS}
    if (visible := series.value("gpus_visible")) is not None:
        found["gpus"] = f"{visible:g}"
        found["gpu models"] = _joined(
            point.labels.get("name", "unknown") for point in series("gpu_info")
        )
    if (links := [point.value for point in series("nvlinks_up")]) and sum(links):
        found["nvlinks up"] = f"{sum(links):g}"
    ports = list(series("infiniband_port_up"))
    if ports:
        found["infiniband ports up"] = f"{sum(point.value for point in ports):g}"
        found["infiniband rates"] = _joined(
            f"{point.value * 8e-9:g} Gb/s"
            for point in series("infiniband_port_rate_bytes_per_second")
        )
        found["infiniband firmware"] = _joined(
            point.labels.get("firmware", "unknown") for point in series("infiniband_device_info")
        )
    for labels, value in series("sysctl_value"):
        found[f"sysctl {labels.get('sysctl', 'unknown')}"] = f"{value:g}"
    for labels, _ in series("software_info", training_job=""):
        name = " of ".join(filter(None, map(labels.get, ("component", "environment"))))
        found["kernel" if name == "kernel" else f"version of {name}"] = labels.get(
            "version", "unknown"
        )
    size = series.value("filesystem_size_bytes", path="/dev/shm")  # noqa: S108 - shared memory
    if size is not None:
        found["shared memory"] = f"{size / (1 << 30):.0f} GiB"
    return found


def _joined(values: Iterable[str]) -> str:
    return ", ".join(sorted(set(values)))
