"""Whether each GPU answers NVML; temperature, power, clocks, throttling, memory, use, modes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from dshealthd.core.collector import Context, Fault, News, Reason, Sample, gauge
from dshealthd.nvml.collector import GpuCollector, GpuCollectorOptions
from dshealthd.nvml.signs import Signs
from dshealthd.nvml.values import Fields, gpu_counter, gpu_gauge, number, told

if TYPE_CHECKING:
    from dshealthd.nvml.device import Device
    from dshealthd.nvml.device import Gpu as Position
    from dshealthd.nvml.session import Session

VISIBLE = gauge(
    "dshealthd_gpus_visible",
    "GPUs that NVML lists, including failing ones; compare with dshealthd_gpus_expected.",
)
DRIVER = gauge(
    "dshealthd_gpu_driver_info",
    "1; versions of the driver, of the newest CUDA that it supports, and of NVML.",
    *("driver", "cuda", "nvml"),
)
UP = gpu_gauge(
    "dshealthd_gpu_up",
    "1 if the GPU could be read, 0 if not: lost, hung, frozen, denied, or gone from NVML's list "
    "since the agent started.",
)
FAULT = gpu_gauge(
    "dshealthd_gpu_fault",
    "1 while the GPU, or a call that reads it, fails for this reason.",
    "reason",
)
INFO = gpu_gauge(
    "dshealthd_gpu_info",
    "1; identity of the GPU. gsp is its GSP firmware version, if it runs one.",
    *("name", "pci", "serial", "vbios", "gsp"),
)
MODE = gpu_gauge(
    "dshealthd_gpu_mode_info",
    "1; modes of the GPU; a pending mode takes effect at the next reset. Empty where the GPU has "
    "no such mode.",
    *("persistence", "compute", "ecc", "ecc_pending", "mig", "mig_pending"),
)
TEMPERATURE = gpu_gauge(
    "dshealthd_gpu_temperature_celsius",
    "Temperature of the core and, if it has a sensor, of the memory.",
    "sensor",
)
LIMIT = gpu_gauge(
    "dshealthd_gpu_temperature_limit_celsius",
    "The GPU's temperature limits: slowdown, shutdown, and the maximum for core (max_operating) "
    "and memory (memory_max).",
    "limit",
)
MARGIN = gpu_gauge(
    "dshealthd_gpu_temperature_margin_celsius",
    "Distance to the maximum operating temperature, as measured by the GPU itself; Hopper and "
    "later.",
)
MARGIN_LIMIT = gpu_gauge(
    "dshealthd_gpu_temperature_margin_limit_celsius",
    "Margin at which the GPU slows down or shuts down, and the minimum margin for core "
    "(max_operating) and memory (memory_max); NVML fields 193-196. Except for slowdown, only if "
    "the GPU reports no absolute limit.",
    "limit",
)
MEMORY_USED = gpu_gauge(
    "dshealthd_gpu_memory_used_bytes",
    "Memory in use, excluding what the driver reserves for itself.",
)
MEMORY_TOTAL = gpu_gauge(
    "dshealthd_gpu_memory_total_bytes", "Total memory, including what the driver reserves."
)
UTILIZATION = gpu_gauge(
    "dshealthd_gpu_utilization_ratio",
    "Share of the last sample period in which a kernel ran; says nothing about how much of the GPU "
    "it used.",
)
ACTIVITY = gpu_gauge(
    "dshealthd_gpu_memory_activity_ratio",
    "Share of the last sample period in which memory was read or written.",
)
POWER = gpu_gauge(
    "dshealthd_gpu_power_watts",
    "Power drawn by the board: a one-second average from Ampere on, but the instantaneous value on "
    "GA100 (A100) and before Ampere.",
)
POWER_LIMIT = gpu_gauge(
    "dshealthd_gpu_power_limit_watts",
    "Power limit in effect (enforced), factory setting (default), and settable range (min, max).",
    "limit",
)
ENERGY = gpu_counter(
    "dshealthd_gpu_energy_joules_total", "Energy used since the driver was loaded."
)
CLOCK = gpu_gauge("dshealthd_gpu_clock_hertz", "Current clock, by domain.", "domain")
CLOCK_MAX = gpu_gauge("dshealthd_gpu_clock_max_hertz", "Maximum clock, by domain.", "domain")
THROTTLE = gpu_gauge(
    "dshealthd_gpu_throttle_active",
    "1 while the clocks are throttled for this reason; NVML's clock event reasons.",
    "reason",
)
THROTTLED = gpu_counter(
    "dshealthd_gpu_throttle_seconds_total",
    "Time for which the clocks were throttled for this reason since the driver was loaded.",
    "reason",
)
RECOVERY = gpu_gauge(
    "dshealthd_gpu_recovery_action",
    "Recovery action that the driver requests: 0 none, 1 GPU reset, 2 reboot, 3 drain of peers, "
    "4 drain and reset, 5 IMEX domain recovery, 6 bus reset, 7 system reboot.",
)

_LIMITS = {
    "shutdown": "NVML_TEMPERATURE_THRESHOLD_SHUTDOWN",
    "slowdown": "NVML_TEMPERATURE_THRESHOLD_SLOWDOWN",
    "memory_max": "NVML_TEMPERATURE_THRESHOLD_MEM_MAX",
    "max_operating": "NVML_TEMPERATURE_THRESHOLD_GPU_MAX",
}
_DOMAINS = {"sm": "NVML_CLOCK_SM", "memory": "NVML_CLOCK_MEM"}
_COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
THROTTLE_REASONS = {
    "gpu_idle": 0x1,
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
    "display_clock_setting": 0x100,
    "board_limit": 0x200,
    "reliability": 0x400,
}
"""Bits of nvmlClocksEventReasons."""
_FIELDS = {
    "memory_temperature": "NVML_FI_DEV_MEMORY_TEMP",
    "recovery": "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION",
    "sw_power_cap": "NVML_FI_DEV_PERF_POLICY_POWER",
    "sw_thermal_slowdown": "NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN",
    "hw_thermal_slowdown": "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN",
    "hw_power_brake_slowdown": "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN",
    "slowdown": "NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT",
    "shutdown": "NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT",
    "memory_max": "NVML_FI_DEV_TEMPERATURE_MEM_MAX_TLIMIT",
    "max_operating": "NVML_FI_DEV_TEMPERATURE_GPU_MAX_TLIMIT",
}
_ASKED = Fields(*_FIELDS.values())


class GpuTelemetry(GpuCollector):
    """Reads a GPU's vital signs every few seconds in about twenty calls; constants once."""

    Options = GpuCollectorOptions
    vital = True
    wakes_on = frozenset({News.GPU_ERROR})

    def __init__(self, options: GpuCollectorOptions, context: Context) -> None:
        super().__init__(options, context)
        self._signs = Signs(context.tell)

    def overview(self, session: Session) -> Iterator[Sample | Fault]:
        """Yield the driver's versions, and the GPUs that have disappeared."""
        if session.fault is None:
            yield VISIBLE(len(session.gpus()))
        else:
            yield session.fault
        yield DRIVER(1, *session.versions)
        for index, uuid in session.gone():
            yield UP(0, index, uuid)
            yield FAULT(1, index, uuid, Reason.NOT_FOUND)
            yield Fault(
                f"gpu {uuid}", Reason.NOT_FOUND, f"NVML no longer lists it; its index was {index}"
            )

    def up(self, gpu: Position, faults: list[Fault]) -> Iterator[Sample]:
        """Yield whether NVML can read a GPU, and why not; nothing within its deadline."""
        if gpu.fault is None or gpu.fault.reason is not Reason.WAITING:
            yield UP(float(gpu.fault is None), *gpu.labels)
        for reason in {fault.reason for fault in faults}:
            yield FAULT(1, *gpu.labels, reason)

    def read(self, gpu: Position, device: Device) -> Iterator[Sample]:
        """Yield the vital signs of one GPU: temperature, power, clocks, memory."""
        labels = gpu.labels
        fields = dict(zip(_FIELDS, device.fields(_ASKED), strict=True))
        yield from device.constants(self.name, lambda: self._constants(labels, device))
        yield from self._modes(labels, device)
        yield from self._heat(labels, device, fields)
        yield from self._power(labels, device)
        if gpu.energy is not None:
            yield ENERGY(gpu.energy / 1e3, *labels)
        yield from self._clocks(labels, device, fields)
        yield from self._memory(labels, device)
        if (use := device.query("nvmlDeviceGetUtilizationRates")) is not None:
            yield from told(UTILIZATION, number(use.gpu), *labels, scale=1e-2)
            yield from told(ACTIVITY, number(use.memory), *labels, scale=1e-2)
        yield from told(RECOVERY, fields["recovery"], *labels)
        self._signs.update(gpu.uuid, device)

    def _constants(self, labels: tuple[str, str], device: Device) -> Iterator[Sample]:
        gsp = device.once("nvmlDeviceGetGspFirmwareVersion")
        yield INFO(
            1,
            *labels,
            device.once("nvmlDeviceGetName") or "",
            device.address(),
            device.once("nvmlDeviceGetSerial") or "",
            device.once("nvmlDeviceGetVbiosVersion") or "",
            gsp.decode(errors="replace") if gsp else "",
        )
        for limit, name in _LIMITS.items():
            celsius = device.once("nvmlDeviceGetTemperatureThreshold", name)
            yield from told(LIMIT, celsius, *labels, limit)
        constraints = device.once("nvmlDeviceGetPowerManagementLimitConstraints")
        lowest, highest = constraints or (None, None)
        limits = {
            "default": device.once("nvmlDeviceGetPowerManagementDefaultLimit"),
            "min": number(lowest),
            "max": number(highest),
        }
        for limit, milliwatts in limits.items():
            yield from told(POWER_LIMIT, milliwatts, *labels, limit, scale=1e-3)
        for domain, name in _DOMAINS.items():
            megahertz = device.once("nvmlDeviceGetMaxClockInfo", name)
            yield from told(CLOCK_MAX, megahertz, *labels, domain, scale=1e6)

    def _modes(self, labels: tuple[str, str], device: Device) -> Iterator[Sample]:
        # Operators change these rarely: read when the GPUs are listed again, once a minute. MIG is
        # read at each sweep, because rules leave out GPUs in MIG mode.
        compute = device.once("nvmlDeviceGetComputeMode")
        yield MODE(
            1,
            *labels,
            _switch(device.once("nvmlDeviceGetPersistenceMode")),
            _COMPUTE_MODES.get(compute, ""),
            *map(_switch, device.once("nvmlDeviceGetEccMode") or (None, None)),
            *map(_switch, device.query("nvmlDeviceGetMigMode") or (None, None)),
        )

    def _heat(
        self, labels: tuple[str, str], device: Device, fields: Mapping[str, float | None]
    ) -> Iterator[Sample]:
        # The second function is deprecated since CUDA 13. The first returns a signed number, so
        # "not available", all bits set, reads -1.
        core = device.first(
            ("nvmlDeviceGetTemperatureV", "NVML_TEMPERATURE_GPU"),
            ("nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"),
        )
        yield from told(TEMPERATURE, None if core == -1 else core, *labels, "core")
        # Some parts without a memory sensor answer 0 rather than "not supported".
        yield from told(TEMPERATURE, fields["memory_temperature"] or None, *labels, "memory")
        yield from told(MARGIN, device.query("nvmlDeviceGetMarginTemperature"), *labels)
        # A margin beside an absolute limit would be a redundant series.
        for limit, name in _LIMITS.items():
            absolute = device.once("nvmlDeviceGetTemperatureThreshold", name)
            if limit == "slowdown" or absolute is None:
                yield from told(MARGIN_LIMIT, fields[limit], *labels, limit)

    def _power(self, labels: tuple[str, str], device: Device) -> Iterator[Sample]:
        yield from told(POWER, device.query("nvmlDeviceGetPowerUsage"), *labels, scale=1e-3)
        enforced = device.query("nvmlDeviceGetEnforcedPowerLimit")
        yield from told(POWER_LIMIT, enforced, *labels, "enforced", scale=1e-3)

    def _clocks(
        self, labels: tuple[str, str], device: Device, fields: Mapping[str, float | None]
    ) -> Iterator[Sample]:
        for domain, name in _DOMAINS.items():
            yield from told(
                CLOCK, device.query("nvmlDeviceGetClockInfo", name), *labels, domain, scale=1e6
            )
        reasons = device.first(
            ("nvmlDeviceGetCurrentClocksEventReasons",),
            ("nvmlDeviceGetCurrentClocksThrottleReasons",),
        )
        supported = device.once("nvmlDeviceGetSupportedClocksEventReasons") or device.once(
            "nvmlDeviceGetSupportedClocksThrottleReasons"
        )
        for reason, bit in THROTTLE_REASONS.items():
            if reasons is not None and (supported is None or supported & bit):
                yield THROTTLE(float(reasons & bit > 0), *labels, reason)
            yield from told(THROTTLED, fields.get(reason), *labels, reason, scale=1e-9)

    def _memory(self, labels: tuple[str, str], device: Device) -> Iterator[Sample]:
        # Version 1, the only one before driver 510, counts reserved memory as used.
        memory = device.first(
            ("nvmlDeviceGetMemoryInfo", "nvmlMemory_v2"), ("nvmlDeviceGetMemoryInfo",)
        )
        if memory is not None:
            yield from told(MEMORY_USED, number(memory.used), *labels)
            yield from told(MEMORY_TOTAL, number(memory.total), *labels)


def _switch(state: int | None) -> str:
    return {0: "off", 1: "on"}.get(state, "") if state is not None else ""
