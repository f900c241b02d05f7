"""The one NVML session of a worker: its list of GPUs, including failing and vanished ones.

It is shared by all GPU collectors: opened and listed once for all, and each GPU is checked once per
sweep before it is read.

GPUs are identified by UUID. What is remembered of a UUID (that it was present, its energy readings)
outlives its handle and its index.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pynvml

from dshealthd.core.collector import (
    Context,
    Fault,
    NotAvailable,
    Reason,
    Sample,
    SourceError,
    read_by,
)
from dshealthd.core.result import fault_of
from dshealthd.core.text import plural
from dshealthd.linux import pci
from dshealthd.nvml import codes
from dshealthd.nvml.device import Device, DeviceError, Gpu, ReadingEnded
from dshealthd.nvml.values import MAX_GPUS

REFRESH = 60.0
"""Seconds until GPUs are listed again, and NVML is reopened to find one that came back."""
FROZEN_SECONDS, FROZEN_SWEEPS = 10.0, 3
"""For how long, and in how many sweeps, an energy counter may stay unchanged."""
SIGNS_OF_LIFE = (
    ("nvmlDeviceGetTemperatureV", "NVML_TEMPERATURE_GPU"),
    ("nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"),
    ("nvmlDeviceGetPowerUsage",),
    ("nvmlDeviceGetPerformanceState",),
)
"""Calls of which one must answer if the energy counter does not."""


@dataclass
class _Meter:
    """An energy counter's last value, since when it is unchanged, and in how many sweeps."""

    value: float
    since: float
    sweeps: int = 0


class Session:
    """NVML and its GPUs, shared by the collectors of a process through `Context.shared`."""

    def __init__(self, context: Context) -> None:
        self.versions = ("", "", "")
        """Versions of driver, CUDA and NVML; empty if NVML does not report them."""
        self._context = context
        self.fault: Fault | None = None
        """What NVML says of itself in this sweep that cannot be true; the GPUs are read."""
        self._gpus: list[Gpu] = []
        self._known: dict[str, int] = dict(context.memory.get("gpus", {}))
        """Index by UUID, including what earlier workers saw, so that a hung GPU keeps its UUID."""
        self._meters: dict[str, _Meter] = {}
        self._open = False
        self._opened_at = self._listed_at = 0.0
        self._sweep = -1
        self._error: SourceError | NotAvailable | None = None

    def gpus(self) -> list[Gpu]:
        """Return the GPUs in NVML's order; those that cannot be read have a fault.

        SourceError if NVML cannot be used, NotAvailable if this machine has no GPU. The first call
        of a sweep does the work.
        """
        if self._sweep != self._context.sweep:
            self._sweep, self._error = self._context.sweep, None
            try:
                self._refresh()
            except (SourceError, NotAvailable) as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._gpus

    def gone(self) -> Iterator[tuple[str, str]]:
        """Yield index and UUID of GPUs of the session that NVML no longer lists."""
        here = {gpu.uuid for gpu in self._gpus}
        return ((str(index), uuid) for uuid, index in self._known.items() if uuid not in here)

    def visit(
        self, gpu: Gpu, read: Callable[[Gpu, Device], Iterable[Sample]], reader: str = ""
    ) -> tuple[list[Sample], list[Fault]]:
        """Return the samples that `read` yields for a GPU of the session, and the faults.

        A GPU that fails as a whole gives no samples for the rest of the sweep. If `reader`, the
        name of a collector, hangs in `read`, only its own readings of the GPU are quarantined.
        """
        device = gpu.device
        if gpu.fault is None:
            self._approach(gpu)
        if gpu.fault is not None or device is None:
            return [], [gpu.fault] if gpu.fault else []
        samples: list[Sample] = []
        try:
            if not gpu.looked_at:
                self._inspect(gpu, device)
            if reader and (fault := self._context.entering(read_by(gpu.part, reader))):
                return [], [fault._replace(part=gpu.part)]
            with contextlib.suppress(ReadingEnded):  # the notes say why; earlier samples stay valid
                samples.extend(read(gpu, device))
        except DeviceError as error:
            device.pop_faults()  # of the calls before
            gpu.fault = fault_of(gpu.part, error)
            return [], [gpu.fault]
        return samples, device.pop_faults()

    def close(self) -> bool:
        """Release NVML and all handles, so that the driver can be unloaded; False if it refuses."""
        self._gpus = []
        if self._open:
            self._open = False
            try:
                pynvml.nvmlShutdown()
            except pynvml.NVMLError as error:
                return bool(error.value == pynvml.NVML_ERROR_UNINITIALIZED)
        return True

    def _refresh(self) -> None:
        if fault := self._context.entering("nvml"):
            raise SourceError(fault.reason, fault.detail)
        now = self._context.monotonic()
        # NVML lists GPUs when it is opened: only reopening it reveals one that came back.
        if self._open and now - self._opened_at >= REFRESH and self._amiss():
            self.close()
        try:
            if not self._open:
                self._start(now)
            count = self._counted(pynvml.nvmlDeviceGetCount())
        except pynvml.NVMLError as error:
            raise self._ended(error) from error
        if count == 0:
            expected = self._expected()
            if expected == 0:
                raise NotAvailable("NVML shows no GPU")
            raise SourceError(Reason.NOT_FOUND, f"NVML shows no GPU, with {_on_the_bus(expected)}")
        if count != len(self._gpus) or now - self._listed_at >= REFRESH:
            self._listed_at = now
            self._gpus = [self._open_gpu(index) for index in range(count)]
        else:
            self._gpus = [
                Gpu(gpu.index, gpu.uuid, gpu.device) if gpu.device else self._open_gpu(gpu.index)
                for gpu in self._gpus
            ]
        self._recognize()

    def _counted(self, count: int) -> int:
        """Return how many GPUs NVML lists: `count`; if none has so many, the last, or the bus's."""
        self.fault = None
        if count <= MAX_GPUS:
            return count
        detail = f"nvmlDeviceGetCount: {count} is no count from 0 to {MAX_GPUS}"
        known = len(self._gpus) or self._expected()
        if not known:
            raise SourceError(Reason.MALFORMED, detail)
        self.fault = Fault("nvml", Reason.MALFORMED, detail)
        return known

    def _start(self, now: float) -> None:
        pynvml.nvmlInit()
        self._open, self._opened_at, self._listed_at = True, now, now - REFRESH
        cuda = _said(pynvml.nvmlSystemGetCudaDriverVersion)
        self.versions = (
            str(_said(pynvml.nvmlSystemGetDriverVersion) or ""),
            f"{cuda // 1000}.{cuda % 1000 // 10}" if isinstance(cuda, int) else "",
            str(_said(pynvml.nvmlSystemGetNVMLVersion) or ""),
        )

    def _amiss(self) -> bool:
        """Return whether reopening NVML may reveal more; not while a GPU is quarantined."""
        if any(gpu.quarantined for gpu in self._gpus):
            return False
        return any(gpu.fault for gpu in self._gpus) or (self._expected() or 0) > len(self._gpus)

    def _approach(self, gpu: Gpu) -> None:
        gpu.fault = self._context.entering(gpu.part)
        gpu.quarantined = gpu.fault is not None

    def _open_gpu(self, index: int) -> Gpu:
        gpu = Gpu(index, "")
        self._approach(gpu)
        if gpu.quarantined:
            return gpu
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            gpu.uuid = pynvml.nvmlDeviceGetUUID(handle)
        except pynvml.NVMLError as error:
            if error.value in codes.OF_SESSION:
                raise self._ended(error) from error
            gpu.fault = Fault(
                gpu.part,
                codes.reason_of_code(error.value),
                f"cannot be opened: {codes.describe(error)}",
            )
        except UnicodeDecodeError as error:
            gpu.fault = Fault(gpu.part, Reason.MALFORMED, f"its UUID is not valid text: {error}")
        else:
            gpu.device = Device(gpu.part, handle, self._ended, self._context.monotonic)
        return gpu

    def _recognize(self) -> None:
        """Give a GPU of the session that could not be opened the UUID last seen at its index."""
        for gpu in self._gpus:
            if gpu.device is not None:
                self._known[gpu.uuid] = gpu.index
        self._context.memory["gpus"] = dict(self._known)
        missing = {int(index): uuid for index, uuid in self.gone()}
        for gpu in self._gpus:
            gpu.uuid = gpu.uuid or missing.get(gpu.index, "")

    def _inspect(self, gpu: Gpu, device: Device) -> None:
        """Check that a GPU answers NVML, and that its energy counter, if any, is not frozen.

        DeviceError if not; a call that fails while another one answers is only noted.
        """
        try:
            gpu.energy = device.query("nvmlDeviceGetTotalEnergyConsumption")
            alive = gpu.energy is not None or any(
                device.query(*call) is not None for call in SIGNS_OF_LIFE
            )
        except ReadingEnded:
            alive = False
        if not alive and device.notes:
            raise DeviceError(device.notes[0].reason, device.notes[0].detail)
        gpu.looked_at = True
        now = self._context.monotonic()
        meter = self._meters.get(gpu.uuid)
        # A counter that is always 0 does not count.
        if not gpu.energy or meter is None or meter.value != gpu.energy:
            self._meters[gpu.uuid] = _Meter(gpu.energy or 0.0, now)
            return
        meter.sweeps += 1
        stands = now - meter.since
        if meter.sweeps >= FROZEN_SWEEPS and stands >= FROZEN_SECONDS:
            raise DeviceError(
                Reason.FROZEN,
                f"its energy counter has been stuck at {gpu.energy / 1000:.0f} J for {stands:.0f} "
                "s: its readings are stale",
            )

    def _expected(self) -> int | None:
        """Return the number of GPUs on the PCI bus, which NVML should list; None if unknown."""
        try:
            return len(pci.bus(self._context.host).gpus())
        except FileNotFoundError:
            return 0
        except OSError:
            return None

    def _ended(self, error: pynvml.NVMLError) -> SourceError | NotAvailable:
        """Close NVML after it failed as a whole; return the error for the rest of the sweep."""
        code = error.value
        # A library that refuses to shut down holds the driver until its process ends.
        replace = not self.close() or code == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
        expected = self._expected()
        missing = code in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        text = codes.describe(error)
        if missing and expected == 0:
            self._error = NotAvailable(f"{text}, and there is no NVIDIA GPU on the PCI bus")
        else:
            text = f"{text}, with {_on_the_bus(expected)}" if missing else text
            self._error = SourceError(codes.reason_of_code(code), text, replace_worker=replace)
        return self._error


def _on_the_bus(expected: int | None) -> str:
    count = (
        "an unknown number of NVIDIA GPUs" if expected is None else plural(expected, "NVIDIA GPU")
    )
    return f"{count} on the PCI bus"


def _said(function: Callable[[], str | int]) -> str | int | None:
    """Return the result of an NVML function about the system; None if it has none."""
    try:
        return function()
    except UnicodeDecodeError:
        return None
    except pynvml.NVMLError as error:
        if error.value in codes.OF_SESSION:
            raise
        return None
