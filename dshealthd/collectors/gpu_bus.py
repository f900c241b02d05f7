"""GPUs on the PCI bus, from sysfs: the number that NVML must agree with.

Read in the agent, so that it stays when NVML hangs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.core.collector import Collector, NotAvailable, gauge
from dshealthd.linux.pci import bus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.core.collector import Fault, Sample

EXPECTED = gauge(
    "dshealthd_gpus_expected",
    "NVIDIA GPUs on the PCI bus, those that are passed through to a virtual machine left "
    "out; from /sys/bus/pci/devices.",
)


class GpuBus(Collector):
    """Lists a directory; what sysfs says of a PCI device comes from the kernel's memory and cannot
    hang.
    """

    _seen = False

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield the count of GPUs on the PCI bus; NotAvailable where there never was one."""
        try:
            count = len(bus(self.host).gpus())
        except FileNotFoundError as error:
            message = "this machine has no PCI bus"
            raise NotAvailable(message) from error
        self._seen = self._seen or count > 0
        if not self._seen:
            message = "no NVIDIA GPU on the PCI bus"
            raise NotAvailable(message)
        yield EXPECTED(count)
