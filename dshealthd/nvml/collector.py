"""Base of the NVML collectors: absence, and visits of each GPU. Imports no pynvml."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dshealthd.core.collector import Collector, CollectorOptions, Fault, Sample, SourceError, Worker
from dshealthd.core.options import Duration, option
from dshealthd.linux.pci import gpus_absent

if TYPE_CHECKING:
    from dshealthd.core.host import Host
    from dshealthd.nvml.device import Device, Gpu
    from dshealthd.nvml.session import Session


@dataclass(frozen=True, kw_only=True)
class GpuCollectorOptions(CollectorOptions):
    """Options of every GPU collector."""

    deadline: Duration = option(
        "10s",
        "Timeout of NVML and of each GPU; without persistence mode, the first call takes "
        "seconds to wake the GPU.",
        minimum="10ms",
    )


@dataclass(frozen=True, kw_only=True)
class SlowGpuCollectorOptions(GpuCollectorOptions):
    """The same for values that rarely change or that the GPU itself counts."""

    interval: Duration = option("15s", "Time from one sample to the next.", minimum="100ms")


class GpuCollector(Collector):
    """Reads every GPU in turn, entering each as a part; a failing GPU does not hide the others."""

    Options: ClassVar[type[GpuCollectorOptions]] = SlowGpuCollectorOptions
    worker = Worker.DEVICE
    parallel = True
    vital: ClassVar[bool] = False
    """Whether a GPU at whose reading it hangs, crashes or runs out of memory is down.

    If not, only this collector's readings of the GPU are missing; the GPU itself is asked for a
    sign of life before.
    """

    @classmethod
    def absent(cls, options: Any, host: Host) -> str | None:  # noqa: ARG003
        """Return why the NVML collectors are absent: no GPU, or an operator released the GPUs."""
        return gpus_absent(host)

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield each GPU's samples and faults. SourceError if NVML or every GPU fails."""
        from dshealthd.nvml.session import Session  # loads pynvml, which must stay out of the agent

        session = self.context.shared(Session)
        gpus = session.gpus()
        yield from self.overview(session)
        for gpu in gpus:
            samples, faults = session.visit(gpu, self.read, "" if self.vital else self.name)
            yield from samples
            yield from faults
            yield from self.up(gpu, faults)
        faulty = [gpu.fault for gpu in gpus if gpu.fault is not None]
        if len(faulty) == len(gpus):
            raise SourceError(
                faulty[0].reason, f"no GPU can be read; {faulty[0].part}: {faulty[0].detail}"
            )

    @abstractmethod
    def read(self, gpu: Gpu, device: Device) -> Iterator[Sample]:
        """Yield an NVML collector's samples of one GPU that is known to answer."""

    # for the subclass
    def overview(self, session: Session) -> Iterator[Sample | Fault]:  # noqa: ARG002
        """Yield an NVML collector's samples that do not belong to a single GPU."""
        yield from ()

    # for the subclass
    def up(self, gpu: Gpu, faults: list[Fault]) -> Iterator[Sample]:  # noqa: ARG002
        """Yield whether a GPU is up, for the one NVML collector that exports it."""
        yield from ()
