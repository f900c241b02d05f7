"""NVIDIA GPUs on the PCI bus, whose count NVML must match; read without NVML."""

from __future__ import annotations

from collections.abc import Iterator

from dshealthd.core.collector import Collector, Fault, NotAvailable, Sample, gauge
from dshealthd.linux.pci import bus

EXPECTED = gauge(
    "dshealthd_gpus_expected",
    "NVIDIA GPUs on the PCI bus, except those passed through to a virtual machine; "
    "/sys/bus/pci/devices.",
)
HIDDEN = gauge(
    "dshealthd_gpus_hidden",
    "GPUs of NVIDIA's driver whose device files the agent may not open, as in a container. Absent "
    "if there are none.",
)
AMD = gauge(
    "dshealthd_gpus_unmonitored",
    "AMD compute GPUs, which are not monitored. Absent if there are none.",
)


class GpuBus(Collector):
    """Lists two directories; the kernel answers for PCI devices, and for whether a device file may
    be opened, from its memory, so cannot hang.
    """

    _seen = False

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield the number of GPUs on the PCI bus; NotAvailable if none was ever seen."""
        try:
            count, amd = len(bus(self.host).gpus()), len(bus(self.host).amd_gpus())
        except FileNotFoundError as error:
            raise NotAvailable("this machine has no PCI bus") from error
        self._seen = self._seen or count > 0
        if amd:
            yield AMD(amd)
        elif not self._seen:
            raise NotAvailable("no NVIDIA GPU on the PCI bus")
        if self._seen:
            yield EXPECTED(count)
        if count and (hidden := bus(self.host).hidden()):
            yield HIDDEN(hidden)
