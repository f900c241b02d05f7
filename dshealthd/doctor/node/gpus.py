"""GPUs and the links between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.core.text import plural
from dshealthd.doctor.check import Result, unknown
from dshealthd.doctor.snapshot_check import snapshot_check
from dshealthd.linux.imex import DAEMON, NODES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.node_context import NodeContext


def _gpus_problems(context: NodeContext) -> Iterator[Result]:
    expected = context.series.value("gpus_expected")
    if expected and context.series.value("gpus_visible") is None:
        yield unknown(
            f"{plural(expected, 'NVIDIA GPU')} on the PCI bus, but no NVML to query them",
            remedy="nvidia-smi; dmesg | grep -i nvrm",
        )


def _gpus(context: NodeContext) -> str:
    series = context.series
    visible = series.value("gpus_visible")
    if visible is None:
        return "no NVIDIA GPU on the PCI bus"
    names = sorted({point.labels["name"] for point in series("gpu_info")})
    expected = series.value("gpus_expected")
    bus = "" if expected is None else f", {expected:g} on the PCI bus"
    return f"{plural(visible, 'GPU')} in NVML{bus}: {', '.join(names)}"


GPUS = snapshot_check(
    "gpu-lost", "gpus", "Every GPU responds", ("gpu_bus", "gpu", "mig"), _gpus, _gpus_problems
)


def _gpu_memory(context: NodeContext) -> str:
    gpus = len(list(context.series("gpu_up")))
    if not gpus:
        return "no GPU, and no GPU error in the kernel log"
    counted = {point.labels["gpu"] for point in context.series("gpu_ecc_errors_total")}
    without = (
        f"; {plural(gpus - len(counted), 'does', 'do')} not count errors"
        if len(counted) < gpus
        else ""
    )
    return f"no uncorrected error, pending remap or recent Xid on {plural(gpus, 'GPU')}{without}"


GPU_MEMORY = snapshot_check(
    "nccl-all-reduce-failed",
    "gpu-memory",
    "GPU memory is sound: ECC, row remaps, Xids",
    ("ecc", "kernel_log"),
    _gpu_memory,
)


def _gpu_metrics(context: NodeContext) -> str:
    expected = context.series.value("gpus_expected") or 0
    if not expected:
        return "no NVIDIA GPU on the PCI bus"
    here = f"{plural(expected, 'NVIDIA GPU')} on the PCI bus"
    if context.series.value("gpus_visible") is None:
        return f"{here}; NVML does not show any at present"
    return f"{here}, and NVML responds"


GPU_METRICS = snapshot_check(
    "gpu-metrics-gone",
    "gpu-metrics",
    "NVML shows the GPUs that are on the PCI bus",
    ("gpu_bus",),
    _gpu_metrics,
)


def _gpu_throttling_problems(context: NodeContext) -> Iterator[Result]:
    telling = {(point.labels["gpu"],) for point in context.series("gpu_throttle_active")}
    for (gpu,) in sorted(context.series.parts("gpu_up", "gpu") - telling):
        yield unknown(
            f"GPU {gpu} does not report whether it is throttled",
            remedy=f"nvidia-smi -i {gpu} -q -d PERFORMANCE,TEMPERATURE",
            component=f"gpu {gpu}",
        )


def _gpu_throttling(context: NodeContext) -> str:
    hottest = max(
        (point.value for point in context.series("gpu_temperature_celsius", sensor="core")),
        default=None,
    )
    if not context.series.parts("gpu_up", "gpu"):
        return "no GPU"
    degrees = "none reports its temperature" if hottest is None else f"hottest: {hottest:g} °C"
    return f"no GPU is throttled; {degrees}"


GPU_THROTTLING = snapshot_check(
    "gpu-throttled",
    "gpu-throttling",
    "GPUs are neither hot nor throttled",
    ("gpu",),
    _gpu_throttling,
    _gpu_throttling_problems,
)


def _imex(context: NodeContext) -> str:
    nodes = [point.value for point in context.series("imex_nodes")]
    if not nodes:
        return "the GPUs are not part of a multi-node NVLink fabric"
    if nodes[0] < 2:  # noqa: PLR2004 - two nodes make a fabric
        return f"{NODES} lists no other nodes: jobs run without NVLink between nodes"
    if any(context.series.value(name) == 0 for name in ("imex_running", "imex_listening")):
        return f"{DAEMON} is not ready at present, for {nodes[0]:g} nodes"
    return f"{DAEMON} runs for {nodes[0]:g} nodes"


IMEX = snapshot_check(
    "bad-link",
    "imex",
    "GPUs are in their NVLink fabric and domain, and IMEX runs where it is configured",
    ("nvlink_domain",),
    _imex,
    alerts="DshealthdNvlinkFabric",
)


def _fabric_manager(context: NodeContext) -> str:
    running = {
        point.labels["daemon"]: point.value for point in context.series("fabric_manager_running")
    }
    if not running:
        return "no NVSwitch is managed by this node"
    states = {True: "running", False: "not running at present"}
    said = [f"{daemon} is {states[value == 1]}" for daemon, value in sorted(running.items())]
    return f"the node has NVSwitches; {', '.join(said)}"


FABRIC_MANAGER = snapshot_check(
    "bad-link",
    "fabric-manager",
    "Fabric Manager runs on nodes with NVSwitches",
    ("nvlink_domain",),
    _fabric_manager,
    alerts="DshealthdFabricManager",
)


def _nvlink(context: NodeContext) -> str:
    series = context.series
    up = [point.value for point in series("nvlinks_up")]
    if not sum(up):
        return "no NVLink"
    states = [point.value for point in series("gpu_fabric_state")]
    fabric = (
        f"; {plural(len(states), 'GPU is', 'GPUs are')} registered with the fabric"
        if states
        else ""
    )
    return f"{plural(sum(up), 'NVLink')} of {plural(len(up), 'GPU')} up{fabric}"


NVLINK = snapshot_check(
    "bad-link",
    "nvlink",
    "NVLinks are up",
    ("nvlink", "nvlink_domain"),
    _nvlink,
    alerts=("DshealthdNvlinkDown", "DshealthdNvlinkDegraded", "DshealthdNvlinkDomain"),
)


def _nvml(context: NodeContext) -> str:
    labels = next((point.labels for point in context.series("gpu_driver_info")), None)
    if labels is None:
        return "no driver, and no NVIDIA GPU that needs one"
    return f"driver {labels['driver']}, CUDA {labels['cuda']}, NVML {labels['nvml']}"


NVML = snapshot_check("nvml-broken", "nvml", "NVML responds", ("gpu", "gpu_processes"), _nvml)


def _pcie_problems(context: NodeContext) -> Iterator[Result]:
    series = context.series
    wide, possible = (
        {(point.labels["gpu"],) for point in series(name)}
        for name in ("pcie_link_width", "pcie_link_width_max")
    )
    for (gpu,) in sorted(series.parts("gpu_up", "gpu") - (wide & possible)):
        yield unknown(
            f"GPU {gpu} does not report its PCIe link width",
            remedy=f"nvidia-smi -i {gpu} -q | grep -A 8 'GPU Link Info'",
            component=f"gpu {gpu}",
        )


def _pcie(context: NodeContext) -> str:
    widths = sorted({int(point.value) for point in context.series("pcie_link_width")})
    return (
        f"all GPUs have their full PCIe width: {', '.join(f'x{width}' for width in widths)}"
        if widths
        else "no GPU"
    )


PCIE = snapshot_check(
    "cpu-offload-slow", "pcie", "PCIe links have their full width", ("pcie",), _pcie, _pcie_problems
)
