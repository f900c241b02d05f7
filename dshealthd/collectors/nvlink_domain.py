"""The NVLink domain of this node's GPUs, from NVML: their registration with the fabric.

On nodes that manage NVSwitches, it also checks their daemons, because NVML keeps reporting the last
GPU state after a daemon dies. In multi-node domains such as GB200 NVL72, it also checks IMEX, which
multi-node jobs need.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dshealthd.core.collector import Context, Fault, News, Sample, gauge
from dshealthd.core.result import fault_of
from dshealthd.linux import imex
from dshealthd.linux.nvswitch import Switches, fabric_manager_enabled
from dshealthd.linux.process import daemon
from dshealthd.nvml.collector import GpuCollector, SlowGpuCollectorOptions
from dshealthd.nvml.values import gpu_gauge, number

if TYPE_CHECKING:
    from dshealthd.nvml.device import Device, Gpu

STATE = gpu_gauge(
    "dshealthd_gpu_fabric_state",
    "Registration with the NVLink fabric: 0 not supported, 1 not started, 2 in progress, 3 "
    "completed. On GPUs whose NVLink 5 links lead to a switch, 0 is a fault.",
)
HEALTHY = gpu_gauge(
    "dshealthd_gpu_fabric_healthy",
    "1 if the registration with the NVLink fabric succeeded and the fabric reports itself healthy.",
)
PROBLEM = gpu_gauge(
    "dshealthd_gpu_fabric_problem",
    "1 for each problem that the NVLink fabric reports for this GPU: registration_failed (NVML's "
    "status), limited_capacity, no_clique (in a fabric of several nodes, clique 0: no other GPU is "
    "reachable), or a bit of NVML's health mask. Absent while there is none.",
    "problem",
)
DOMAIN = gpu_gauge(
    "dshealthd_nvlink_domain_info",
    "1; the GPU's multi-node NVLink fabric (cluster UUID) and its clique there. GPUs with the "
    "same UUID and clique reach each other over NVLink.",
    *("domain", "clique"),
)
MANAGER_RUNNING = gauge(
    "dshealthd_fabric_manager_running",
    "1 if this NVSwitch daemon is running: nv-fabricmanager, and nvlsm on Blackwell boards. "
    "Only on nodes that manage NVSwitches.",
    "daemon",
)
MANAGER_ENABLED = gauge(
    "dshealthd_fabric_manager_enabled",
    "1 if systemd starts nvidia-fabricmanager at boot. Only on nodes that manage NVSwitches.",
)
NODES = gauge(
    "dshealthd_imex_nodes",
    "Nodes among which IMEX shares GPU memory, from its nodes_config.cfg; 0 if it is not set "
    "up. Only in an NVLink domain of several nodes, like all IMEX metrics.",
)
RUNNING = gauge("dshealthd_imex_running", "1 if a process of the service nvidia-imex is running.")
LISTENING = gauge(
    "dshealthd_imex_listening",
    "1 if IMEX's port (SERVER_PORT, default 50000) has a listener in the service's namespace.",
)
CHANNELS = gauge(
    "dshealthd_imex_channels",
    "IMEX channels, files below /dev/nvidia-caps-imex-channels; a job on several nodes needs one.",
)

REGISTERED = 3
"""NVML_GPU_FABRIC_STATE_COMPLETED."""
_LIMITED = 3
"""NVML_GPU_FABRIC_HEALTH_SUMMARY_LIMITED_CAPACITY."""
_MANAGER = "Fabric Manager"
"""The part of this source, should it not be readable."""
_TWO_BITS = {
    # Lowest bit, and the value of the two bits that is a problem.
    "degraded_bandwidth": (0, 1),
    "route_recovery": (2, 1),
    "route_unhealthy": (4, 1),
    "access_timeout_recovery": (6, 1),
    "no_partition_assigned": (12, 2),
    "manager_disconnected": (14, 2),
}
_CONFIGURATION = {
    2: "incorrect_system_guid",
    3: "incorrect_chassis_serial",
    4: "no_partition",
    5: "insufficient_nvlinks",
    6: "incompatible_firmware",
    7: "invalid_location",
    8: "gpu_state_invalid",
}
"""NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_*, bits 8-11."""


class NvlinkDomain(GpuCollector):
    """Reads each GPU's fabric, and the state of the daemons that it takes on this node."""

    wakes_on = frozenset({News.GPU_ERROR, News.NVLINK})

    def __init__(self, options: SlowGpuCollectorOptions, context: Context) -> None:
        super().__init__(options, context)
        self._several_nodes = self._on_fabric = False
        self._daemons: dict[str, int | None] = {}
        self._switches = Switches(self.host)

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield the NVLink domain of each GPU, then the state of Fabric Manager and of IMEX."""
        self._several_nodes = self._on_fabric = False
        yield from super().collect()
        yield from self._managers()
        if self._several_nodes:
            yield from self._imex()

    def read(self, gpu: Gpu, device: Device) -> Iterator[Sample]:
        """Yield the NVLink domain of one GPU; nothing if its driver does not support one."""
        fabric = device.fill("nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfo_v3_t")
        fabric = fabric or device.fill("nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfo_v2_t")
        if fabric is None or number(fabric.state) is None:
            return
        yield STATE(fabric.state, *gpu.labels)
        self._on_fabric |= fabric.state > 0
        if fabric.state != REGISTERED:
            return
        several_nodes = any(fabric.clusterUuid)
        self._several_nodes |= several_nodes
        alone = several_nodes and not fabric.cliqueId
        healthy = fabric.status == 0 and not alone and _healthy(fabric)
        yield HEALTHY(float(healthy), *gpu.labels)
        for problem in _problems(fabric):
            yield PROBLEM(1.0, *gpu.labels, problem)
        if alone:
            yield PROBLEM(1.0, *gpu.labels, "no_clique")
        elif several_nodes:
            import uuid  # 0.2 MiB that only GPUs with a fabric need

            domain = str(uuid.UUID(bytes=bytes(fabric.clusterUuid)))
            yield DOMAIN(1.0, *gpu.labels, domain, str(fabric.cliqueId))

    def _managers(self) -> Iterator[Sample | Fault]:
        if (fault := self.context.entering(_MANAGER)) is not None:
            yield fault
            return
        try:
            wanted = self._switches.daemons(on_fabric=self._on_fabric)
            for name in wanted:
                yield MANAGER_RUNNING(float(self._running(name) is not None), name)
            if wanted:
                yield MANAGER_ENABLED(float(fabric_manager_enabled(self.host)))
        except OSError as error:
            yield fault_of(_MANAGER, error)

    def _running(self, name: str) -> int | None:
        """Return the pid of a daemon, None if it is not running. OSError."""
        self._daemons[name] = daemon(self.host, name, self._daemons.get(name))
        return self._daemons[name]

    def _imex(self) -> Iterator[Sample | Fault]:
        try:
            settings = imex.settings(self.host)
            nodes = len(imex.nodes(self.host, settings))
            yield NODES(nodes)
            yield CHANNELS(imex.channels(self.host))
            if not nodes:
                return
            pid = self._running(imex.DAEMON)
            yield RUNNING(float(pid is not None))
            if pid is not None:
                port = int(settings.get("SERVER_PORT") or imex.PORT)
                yield LISTENING(float(imex.is_listening(self.host, pid, port)))
        except (OSError, ValueError, ArithmeticError) as error:
            yield fault_of("imex", error)


def _problems(fabric: Any) -> Iterator[str]:
    if fabric.status:
        yield "registration_failed"
    if getattr(fabric, "healthSummary", 0) == _LIMITED:
        yield "limited_capacity"
    for problem, (shift, bad) in _TWO_BITS.items():
        if fabric.healthMask >> shift & 0x3 == bad:
            yield problem
    configuration = fabric.healthMask >> 8 & 0xF
    if configuration > 1:
        yield _CONFIGURATION.get(configuration, "incorrect_configuration")


def _healthy(fabric: Any) -> bool:
    """Return whether the fabric is healthy: by NVML's own summary, else by the problem bits."""
    summary = getattr(fabric, "healthSummary", 0)
    if summary:
        return bool(summary == 1)
    return next(_problems(fabric), None) is None
