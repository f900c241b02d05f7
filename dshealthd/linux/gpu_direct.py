"""What GPUDirect RDMA needs from the host: a driver through which adapters reach GPU memory, and an
IOMMU that does not translate. From files of the kernel, on nodes with NVIDIA GPUs and RDMA
adapters.
"""

from __future__ import annotations

from dshealthd.core.host import Host, lines_of, read, read_existing
from dshealthd.linux.infiniband import adapters, of_nvidia
from dshealthd.linux.pci import bus

PEER_MEMORY = frozenset({"nvidia_peermem", "nv_peer_mem"})
FIRST_KERNEL = (5, 12)
"""The first kernel in which an adapter can read a GPU's memory as a DMA-BUF."""


def gpus(host: Host) -> tuple[str, ...]:
    """Return the addresses of this machine's GPUs; empty without a PCI bus. OSError."""
    try:
        return bus(host).gpus()
    except FileNotFoundError:
        return ()


def paths_not_judged(host: Host) -> str:
    """Return why PCI switches and IOMMU of this machine are not judged; "" if they are. OSError."""
    if not gpus(host) or not adapters(host):
        return "no GPUs with RDMA adapters"
    flags = [line for line in lines_of(read(host.proc("cpuinfo"))) if line.startswith("flags")]
    if not flags:
        return "not an x86 machine"
    return "a virtual machine, which needs ACS and ATS" if " hypervisor" in flags[0] else ""


def peer_memory(host: Host) -> bool | None:
    """Return whether NVIDIA's adapters reach GPU memory; None without them or a driver. OSError.

    Through the module nvidia_peermem, or as a DMA-BUF of the open driver.
    """
    version = read_existing(host.proc("driver/nvidia/version"))
    if version is None or not of_nvidia(host) or not gpus(host):
        return None
    modules = {line.split(" ", 1)[0] for line in lines_of(read(host.proc("modules")))}
    release = read(host.proc("sys/kernel/osrelease")).strip()
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdecimal())
    by_buffer = "Open Kernel Module" in version and numbers >= FIRST_KERNEL
    return by_buffer or not PEER_MEMORY.isdisjoint(modules)


def gpus_translated(host: Host) -> int | None:
    """Return how many GPUs an IOMMU translates the addresses of; None where it may. OSError."""
    if paths_not_judged(host):
        return None
    places = (host.sys(f"bus/pci/devices/{address}/iommu_group/type") for address in gpus(host))
    # Without an IOMMU in use there is no such file.
    return sum((read_existing(place) or "").startswith("DMA") for place in places)
