"""Whether each GPU answers NVML, and its vital signs.

Temperature, power, clocks and what slows them, memory, utilisation, modes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.core.collector import Fault, News, Reason, counter, gauge
from dshealthd.core.options import Duration, option
from dshealthd.nvml.collector import GpuCollector, GpuCollectorOptions
from dshealthd.nvml.signs import Signs
from dshealthd.nvml.values import Fields, number, told

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dshealthd.core.collector import Context, Sample
    from dshealthd.nvml.device import Device
    from dshealthd.nvml.device import Gpu as Position
    from dshealthd.nvml.session import Session

_ID = ("gpu", "uuid")
VISIBLE = gauge(
    "dshealthd_gpus_visible",
    "GPUs that NVML lists, those that fail included; compare with dshealthd_gpus_expected.",
)
DRIVER = gauge(
    "dshealthd_gpu_driver_info",
    "1; versions of the driver, of the newest CUDA it serves, and of NVML.",
    "driver",
    "cuda",
    "nvml",
)
UP = gauge(
    "dshealthd_gpu_up",
    "1 if the GPU could be read, 0 if not: lost, hung, frozen, denied, or gone from NVML's list "
    "since the agent started. Single calls that fail are in dshealthd_gpu_collector_fault.",
    *_ID,
)
FAULT = gauge(
    "dshealthd_gpu_fault",
    "1 while the GPU, or one of the calls that read it, fails for this reason.",
    *_ID,
    "reason",
)
COLLECTOR_FAULT = gauge(
    "dshealthd_gpu_collector_fault",
    "1 while a collector of GPUs cannot read all that it should of this GPU, for this reason; "
    "what it could not read is absent. NVML's return code, as of that collector's last sweep.",
    *_ID,
    "collector",
    "reason",
)
INFO = gauge(
    "dshealthd_gpu_info",
    "1; what the GPU is. gsp is the version of the firmware that runs it, if one does.",
    *_ID,
    "name",
    "pci",
    "serial",
    "vbios",
    "gsp",
)
MODE = gauge(
    "dshealthd_gpu_mode_info",
    "1; how the GPU is set up; a pending mode comes with the next reset. Empty where the GPU "
    "has no such mode.",
    *_ID,
    *("persistence", "compute", "ecc", "ecc_pending", "mig", "mig_pending"),
)
TEMPERATURE = gauge(
    "dshealthd_gpu_temperature_celsius",
    "Temperature of the core and, where there is such a sensor, of the memory.",
    *_ID,
    "sensor",
)
LIMIT = gauge(
    "dshealthd_gpu_temperature_limit_celsius",
    "The part's own limits: where it slows down, shuts down, and what core (max_operating) "
    "and memory (memory_max) should not exceed.",
    *_ID,
    "limit",
)
MARGIN = gauge(
    "dshealthd_gpu_temperature_margin_celsius",
    "Distance to the highest operating temperature, as the part itself measures it; Hopper "
    "and later.",
    *_ID,
)
MARGIN_LIMIT = gauge(
    "dshealthd_gpu_temperature_margin_limit_celsius",
    "The margin at which the part slows down, shuts down, and that core (max_operating) and memory "
    "(memory_max) should keep; NVML fields 193-196. Beside slowdown, only those of which the part "
    "gives no absolute limit.",
    *_ID,
    "limit",
)
MEMORY_USED = gauge(
    "dshealthd_gpu_memory_used_bytes",
    "Memory in use; what the driver reserves for itself is not counted in it.",
    *_ID,
)
MEMORY_TOTAL = gauge(
    "dshealthd_gpu_memory_total_bytes", "Memory of the GPU, with what the driver reserves.", *_ID
)
UTILIZATION = gauge(
    "dshealthd_gpu_utilization_ratio",
    "Share of the last sample period in which a kernel ran; says nothing of how much of the "
    "GPU it used.",
    *_ID,
)
ACTIVITY = gauge(
    "dshealthd_gpu_memory_activity_ratio",
    "Share of the last sample period in which memory was read or written.",
    *_ID,
)
POWER = gauge(
    "dshealthd_gpu_power_watts",
    "Power drawn by the board: a one-second average from Ampere on, but for GA100 (A100), where it "
    "is that of the moment, as before Ampere.",
    *_ID,
)
MODULE_POWER = gauge(
    "dshealthd_gpu_module_power_watts",
    "Power drawn by the module, CPU and memory included, where a module is measured as a whole "
    "(GH200, GB200); NVML field 185.",
    *_ID,
)
POWER_LIMIT = gauge(
    "dshealthd_gpu_power_limit_watts",
    "Power limit in force (enforced), of the factory (default), and the bounds it can be set to.",
    *_ID,
    "limit",
)
ENERGY = counter("dshealthd_gpu_energy_joules_total", "Energy since the driver was loaded.", *_ID)
CLOCK = gauge("dshealthd_gpu_clock_hertz", "Clock at present, by domain.", *_ID, "domain")
CLOCK_MAX = gauge(
    "dshealthd_gpu_clock_max_hertz", "Highest clock of the part, by domain.", *_ID, "domain"
)
THROTTLE = gauge(
    "dshealthd_gpu_throttle_active",
    "1 while this reason holds the clocks down; NVML's clock event reasons.",
    *_ID,
    "reason",
)
THROTTLED = counter(
    "dshealthd_gpu_throttle_seconds_total",
    "Time for which this reason held the clocks down, since the driver was loaded.",
    *_ID,
    "reason",
)
STATE = gauge(
    "dshealthd_gpu_performance_state", "Performance state: 0 is the fastest, 15 the slowest.", *_ID
)
RECOVERY = gauge(
    "dshealthd_gpu_recovery_action",
    "What the driver asks for: 0 nothing, 1 GPU reset, 2 reboot, 3 drain of peers, 4 drain "
    "and reset, "
    "5 IMEX domain recovery, 6 bus reset, 7 system reboot.",
    *_ID,
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
_MODULE = 1
"""NVML_POWER_SCOPE_MODULE."""
_ASKED = Fields(*_FIELDS.values(), ("NVML_FI_DEV_POWER_AVERAGE", _MODULE))
_UNKNOWN_STATE = 32


@dataclass(frozen=True, kw_only=True)
class GpuOptions(GpuCollectorOptions):
    """Also when a GPU that answers counts as frozen."""

    frozen_after: Duration = option(
        "10s",
        "How long a GPU's energy counter may stay the same before its readings count as frozen "
        "and are withheld.",
        minimum="1s",
    )
    frozen_sweeps: int = option(3, "How many sweeps must find it so.", minimum=1)


class GpuTelemetry(GpuCollector):
    """Reads what matters of a GPU every few seconds in about twenty calls.

    What does not change is asked once.
    """

    Options = GpuOptions
    wakes_on = frozenset({News.GPU_ERROR})

    def __init__(self, options: GpuOptions, context: Context) -> None:
        """Set the session's patience with frozen GPUs, which concerns every collector of GPUs."""
        super().__init__(options, context)
        session = self.session()
        session.frozen_after, session.frozen_sweeps = options.frozen_after, options.frozen_sweeps
        self._signs = Signs(context.tell)

    def overview(self, session: Session) -> Iterator[Sample | Fault]:
        """Yield the driver's versions, and the GPUs that were here and no longer are."""
        yield VISIBLE(len(session.gpus()))
        yield DRIVER(1, session.versions.driver, session.versions.cuda, session.versions.nvml)
        for index, uuid in session.gone():
            yield UP(0, index, uuid)
            yield FAULT(1, index, uuid, Reason.NOT_FOUND)
            yield Fault(
                f"gpu {uuid}", Reason.NOT_FOUND, f"NVML no longer lists it; it was number {index}"
            )

    def up(self, gpu: Position, faults: list[Fault]) -> Iterator[Sample]:
        """Yield whether a GPU is up for NVML, and why it could not be read.

        One whose deadline is not over is neither up nor down.
        """
        if gpu.fault is None or gpu.fault.reason is not Reason.WAITING:
            yield UP(float(gpu.fault is None), *gpu.labels)
        for reason in {fault.reason for fault in faults}:
            yield FAULT(1, *gpu.labels, reason)
        for collector, why in self.session().troubles(gpu):
            yield COLLECTOR_FAULT(1, *gpu.labels, collector, why)

    def read(self, gpu: Position, device: Device) -> Iterator[Sample]:
        """Yield the vital signs of one GPU: temperature, power, clocks, memory."""
        labels = gpu.labels
        *values, module_power = device.fields(_ASKED)
        fields = dict(zip(_FIELDS, values, strict=True))
        yield from self._identity(labels, device)
        yield from self._heat(labels, device, fields)
        yield from self._power(labels, device)
        yield from told(MODULE_POWER, module_power, *labels, scale=1e-3)
        if gpu.energy is not None:
            yield ENERGY(gpu.energy / 1e3, *labels)
        yield from self._clocks(labels, device, fields)
        yield from self._memory(labels, device)
        if (use := device.ask("nvmlDeviceGetUtilizationRates")) is not None:
            yield from told(UTILIZATION, number(use.gpu), *labels, scale=1e-2)
            yield from told(ACTIVITY, number(use.memory), *labels, scale=1e-2)
        yield from told(RECOVERY, fields["recovery"], *labels)
        self._signs.look(gpu.uuid, device)

    def _identity(self, labels: tuple[str, str], device: Device) -> Iterator[Sample]:
        pci = device.once("nvmlDeviceGetPciInfo_v3")
        gsp = device.once("nvmlDeviceGetGspFirmwareVersion")
        yield INFO(
            1,
            *labels,
            device.once("nvmlDeviceGetName") or "",
            f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0" if pci else "",
            device.once("nvmlDeviceGetSerial") or "",
            device.once("nvmlDeviceGetVbiosVersion") or "",
            gsp.decode(errors="replace") if gsp else "",
        )
        # Set by operators, now and then: asked when the GPUs are listed anew, once a minute. MIG is asked
        # at each sweep, as rules leave out GPUs that are divided.
        compute = device.once("nvmlDeviceGetComputeMode")
        yield MODE(
            1,
            *labels,
            _switch(device.once("nvmlDeviceGetPersistenceMode")),
            _COMPUTE_MODES.get(compute, ""),
            *map(_switch, device.once("nvmlDeviceGetEccMode") or (None, None)),
            *map(_switch, device.ask("nvmlDeviceGetMigMode") or (None, None)),
        )

    def _heat(
        self, labels: tuple[str, str], device: Device, fields: Mapping[str, float | None]
    ) -> Iterator[Sample]:
        # The second name is deprecated since CUDA 13. The first one's number is signed, so that
        # "not available", all bits set, reads -1.
        core = device.first(
            ("nvmlDeviceGetTemperatureV", "NVML_TEMPERATURE_GPU"),
            ("nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"),
        )
        yield from told(TEMPERATURE, None if core == -1 else core, *labels, "core")
        # Some parts without a memory sensor answer 0 rather than "not supported".
        yield from told(TEMPERATURE, fields["memory_temperature"] or None, *labels, "memory")
        absolute = {
            limit: device.once("nvmlDeviceGetTemperatureThreshold", name)
            for limit, name in _LIMITS.items()
        }
        for limit, celsius in absolute.items():
            yield from told(LIMIT, celsius, *labels, limit)
        yield from told(MARGIN, device.ask("nvmlDeviceGetMarginTemperature"), *labels)
        # Two scales for one limit would be series without news.
        for limit in _LIMITS:
            if limit == "slowdown" or absolute[limit] is None:
                yield from told(MARGIN_LIMIT, fields[limit], *labels, limit)

    def _power(self, labels: tuple[str, str], device: Device) -> Iterator[Sample]:
        yield from told(POWER, device.ask("nvmlDeviceGetPowerUsage"), *labels, scale=1e-3)
        lowest, highest = device.once("nvmlDeviceGetPowerManagementLimitConstraints") or (
            None,
            None,
        )
        limits = {
            "enforced": device.ask("nvmlDeviceGetEnforcedPowerLimit"),
            "default": device.once("nvmlDeviceGetPowerManagementDefaultLimit"),
            "min": number(lowest),
            "max": number(highest),
        }
        for limit, milliwatts in limits.items():
            yield from told(POWER_LIMIT, milliwatts, *labels, limit, scale=1e-3)

    def _clocks(
        self, labels: tuple[str, str], device: Device, fields: Mapping[str, float | None]
    ) -> Iterator[Sample]:
        for domain, name in _DOMAINS.items():
            yield from told(
                CLOCK, device.ask("nvmlDeviceGetClockInfo", name), *labels, domain, scale=1e6
            )
            yield from told(
                CLOCK_MAX,
                device.once("nvmlDeviceGetMaxClockInfo", name),
                *labels,
                domain,
                scale=1e6,
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
        state = device.ask("nvmlDeviceGetPerformanceState")
        yield from told(STATE, None if state == _UNKNOWN_STATE else state, *labels)

    def _memory(self, labels: tuple[str, str], device: Device) -> Iterator[Sample]:
        # The first version, of drivers before 510, counts what is reserved as used.
        memory = device.first(
            ("nvmlDeviceGetMemoryInfo", "nvmlMemory_v2"), ("nvmlDeviceGetMemoryInfo",)
        )
        if memory is not None:
            yield from told(MEMORY_USED, number(memory.used), *labels)
            yield from told(MEMORY_TOTAL, number(memory.total), *labels)


def _switch(state: int | None) -> str:
    return {0: "off", 1: "on"}.get(state, "") if state is not None else ""
