"""The base of NVML's collectors: when there is nothing to do, and how they go from GPU to GPU.

Imports no pynvml.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dshealthd.core.collector import Collector, CollectorOptions, SourceError, Worker
from dshealthd.core.options import Duration, option
from dshealthd.linux.pci import gpus_absent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.core.collector import Fault, Sample
    from dshealthd.core.host import Host
    from dshealthd.nvml.device import Device, Gpu
    from dshealthd.nvml.session import Session


@dataclass(frozen=True, kw_only=True)
class GpuCollectorOptions(CollectorOptions):
    """What every collector of GPUs can be told."""

    deadline: Duration = option(
        "10s",
        "How long NVML or one GPU may take before it is given up; without persistence mode "
        "the first call wakes the GPU, for seconds.",
        minimum="10ms",
    )
    release_file: Path = option(
        Path("/run/dshealthd/release-gpus"),
        "While this file exists the collector is off; once it is so for all collectors of "
        "GPUs, the driver is free to be unloaded.",
    )


@dataclass(frozen=True, kw_only=True)
class SlowGpuCollectorOptions(GpuCollectorOptions):
    """The same for what changes seldom, or is counted by the GPU itself."""

    interval: Duration = option("15s", "Time from one sample to the next.", minimum="100ms")


class GpuCollector(Collector):
    """Reads every GPU in turn, each approached first; one that fails does not hide the others."""

    Options: ClassVar[type[GpuCollectorOptions]] = SlowGpuCollectorOptions
    worker = Worker.DEVICE
    parallel = True

    @classmethod
    def absent(cls, options: Any, host: Host) -> str | None:
        """Say why NVML's collectors have nothing to do: no GPU, or an operator wants them free."""
        return gpus_absent(options.release_file, host)

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield what an NVML collector reads of each GPU, and a fault for each that fails.

        SourceError if NVML or every GPU does.
        """
        session = self.session()
        gpus = session.gpus()
        yield from self.overview(session)
        for gpu in gpus:
            samples, faults = session.visit(gpu, self.read)
            yield from samples
            yield from faults
            session.note(self.name, gpu, faults)
            yield from self.up(gpu, faults)
        faulty = [gpu.fault for gpu in gpus if gpu.fault is not None]
        if len(faulty) == len(gpus):
            raise SourceError(
                faulty[0].reason, f"no GPU can be read; {faulty[0].part}: {faulty[0].detail}"
            )

    def session(self) -> Session:
        """Return the NVML session of this collector's worker."""
        from dshealthd.nvml.session import Session  # loads pynvml, which has no place in the agent

        return self.context.shared(Session)

    @abstractmethod
    def read(self, gpu: Gpu, device: Device) -> Iterator[Sample]:
        """Read for an NVML collector one GPU that is known to answer."""

    def overview(self, session: Session) -> Iterator[Sample | Fault]:  # noqa: ARG002 - for the subclass
        """Yield the samples of an NVML collector that belong to no single GPU."""
        yield from ()

    def up(self, gpu: Gpu, faults: list[Fault]) -> Iterator[Sample]:  # noqa: ARG002 - for the subclass
        """Yield whether a GPU is up, for the one NVML collector that says so."""
        yield from ()
