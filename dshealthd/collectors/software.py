"""Versions of software: of the node, of configured Python environments, and of jobs."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dshealthd.core.collector import (
    Collector,
    CollectorOptions,
    Context,
    Fault,
    Reason,
    Sample,
    SourceError,
    Worker,
    gauge,
)
from dshealthd.core.host import read, read_existing
from dshealthd.core.options import Duration, constant, option
from dshealthd.core.result import fault_of, one_of_many
from dshealthd.jobs import shares
from dshealthd.jobs.installation import Installations, Versions
from dshealthd.jobs.loaded import Libraries, libraries
from dshealthd.jobs.loaded import versions as running
from dshealthd.jobs.processes import ProcessTable, TrainingProcess
from dshealthd.linux import gpu_direct, pci, security
from dshealthd.linux.process_root import Root
from dshealthd.linux.security import firewall_configuration

try:
    from _blake2 import blake2b  # what hashlib returns, without the 1 MiB of OpenSSL it loads
except ImportError:
    from hashlib import blake2b


T = TypeVar("T")

INFO = gauge(
    "dshealthd_software_info",
    "1 for each version in use: on the node (environment and training_job empty), in a "
    "configured environment, or in a training job (the installed version until its processes "
    "load one).",
    *("component", "version", "environment", "training_job"),
)
PEER_MEMORY = gauge(
    "dshealthd_gpu_direct_peer_memory",
    "1 if NVIDIA adapters can access GPU memory, through the module nvidia_peermem or as a "
    "DMA-BUF of the open driver. Only with GPUs and such adapters.",
)
TRANSLATED = gauge(
    "dshealthd_gpu_direct_translated_gpus",
    "GPUs whose addresses an IOMMU translates, for which GPUDirect RDMA needs pass-through. Only "
    "with RDMA adapters, on x86, and not in a virtual machine.",
)
FINGERPRINT = gauge(
    "dshealthd_software_fingerprint",
    "48-bit digest of the version or settings, for comparison across nodes. Node-specific "
    "arguments of the kernel command line, such as root=, are left out.",
    *("component", "environment", "training_job"),
)

_DRIVER = re.compile(r"Kernel Module(?:\s+for\s+\S+)?\s+(\d+\.\d+(?:\.\d+)?)\b")
_OFED = re.compile(r"\b((?:MLNX_OFED_LINUX|OFED-internal|MLNX_EN)-\d[\d.-]*\d)")
_VERBS = re.compile(r"libibverbs\.so\.1\.\d+\.(\d[\w.]*)")
_CUDA = re.compile(r'"cuda"\s*:\s*\{[^{}]*"version"\s*:\s*"([^"]+)"')
_OWN_ARGUMENTS = frozenset((
    "BOOT_IMAGE", "root", "rootflags", "resume", "initrd", "ip", "ifname", "BOOTIF",
    "systemd.machine_id", "systemd.hostname", "rd", "netroot",
    "wwid",  # Warewulf's: the address of the network card
    "boot",  # a disk's UUID, with FIPS
    "ostree",  # boot.0 or boot.1, in turn with each upgrade of a CoreOS
))  # fmt: skip
"""Whole, or up to the first dot."""
_SYSCTLS = (
    "kernel/numa_balancing", "kernel/pid_max", "kernel/shmmax", "fs/nr_open",
    "fs/inotify/max_user_instances", "vm/nr_hugepages", "vm/overcommit_memory",
    "vm/max_map_count", "vm/swappiness", "vm/zone_reclaim_mode", "net/core/somaxconn",
    "net/core/rmem_max", "net/core/wmem_max", "net/ipv4/tcp_rmem", "net/ipv4/tcp_wmem",
    "net/ipv4/tcp_tw_reuse", "net/ipv4/tcp_fin_timeout", "net/ipv4/ip_local_port_range",
    "net/ipv4/tcp_mtu_probing", "net/ipv4/conf/all/arp_ignore", "net/ipv4/conf/all/arp_announce",
    "net/ipv4/conf/all/rp_filter",
)  # fmt: skip
"""Settings of tuning guides for DeepSpeed, NCCL and RoCE that do not follow the memory's size."""
_PROCESSES = 8
"""Most processes of a job to search for one that has loaded torch."""


def parse_os_release(text: str) -> str | None:
    """Return name and version of `/etc/os-release`, such as `debian 12`."""
    fields = {
        key: value.strip("\"'")
        for key, _, value in (line.partition("=") for line in text.splitlines())
    }
    return " ".join(fields[key] for key in ("ID", "VERSION_ID") if key in fields) or None


def parse_command_line(text: str) -> str:
    """Return the kernel's arguments, sorted, without those of this node's disks and addresses."""
    return " ".join(
        sorted(
            word
            for word in text.split()
            if _OWN_ARGUMENTS.isdisjoint((name := word.partition("=")[0], name.partition(".")[0]))
        )
    )


def parse_configuration(text: str) -> str:
    """Return the lines of a settings file, sorted, without comments, for its fingerprint."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return "\n".join(sorted(line for line in lines if line))


def fingerprint(text: str) -> int:
    """Return a 48-bit digest of software or settings, which a float holds exactly."""
    return int.from_bytes(blake2b(text.encode(errors="replace"), digest_size=6).digest(), "big")


@dataclass(frozen=True, kw_only=True)
class SoftwareOptions(CollectorOptions):
    """Options of software versions."""

    interval: Duration = option("1m", "Time from one sample to the next.", minimum="100ms")
    deadline: Duration = constant("5s")
    """As long as a path of `filesystem` may take: its files may be on a network."""
    environments: tuple[Path, ...] = option([], "Python environments to check, such as /opt/venv.")

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield each invalid option of software versions, and why."""
        for path in self.environments:
            if not path.is_absolute():
                yield "environments", f"{path} must be an absolute path"


class Software(Collector):
    """Reads files, which may be on a network; runs and imports none of the software."""

    worker = Worker.STORAGE

    Options = SoftwareOptions

    def __init__(self, options: SoftwareOptions, context: Context) -> None:
        super().__init__(options, context)
        self._installations = Installations()
        self._loaded: dict[tuple[int, int], Libraries] = {}

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield versions and fingerprints of installed software; a failed read is a fault."""
        self._installations.begin()
        known, last = False, None
        for item in itertools.chain(self._node(), self._environments(), self._jobs()):
            known, last = (True, last) if isinstance(item, Sample) else (known, item)
            yield item
        if last is not None and not known:
            raise SourceError(last.reason, last.detail)

    def _node(self) -> Iterator[Sample | Fault]:
        versions: dict[str, Callable[[], str | None]] = {
            "kernel": lambda: read(self.host.proc("sys/kernel/osrelease")).strip(),
            "driver": self._driver,
            "os": lambda: parse_os_release(self._first("etc/os-release", "usr/lib/os-release")),
            "mlx5_core": lambda: read(self.host.sys("module/mlx5_core/version")).strip(),
            "ofed": lambda: _found(_OFED, self._first("usr/bin/ofed_info")),
            "rdma_core": self._rdma_core,
            "selinux": lambda: security.mode(self.host),
            "cuda_toolkit": lambda: _found(_CUDA, self._first("usr/local/cuda/version.json")),
        }
        settings: dict[str, Callable[[], str | None]] = {
            "kernel_command_line": lambda: parse_command_line(read(self.host.proc("cmdline"))),
            "sysctl": lambda: "\n".join(f"{name}={self._sysctl(name)}" for name in _SYSCTLS),
            "driver_parameters": lambda: parse_configuration(
                read(self.host.proc("driver/nvidia/params"))
            ),
            "nccl_configuration": self._nccl_configuration,
            "firewall_configuration": lambda: firewall_configuration(self.host),
            "topology": lambda: pci.describe(self.host),
        }
        for component, look in (versions | settings).items():
            text = self._attempt(component, look)
            if isinstance(text, Fault):
                yield text
            elif text is not None and component in versions:
                yield from _show([(component, text)])
            elif text is not None:
                yield FINGERPRINT(fingerprint(text), component, "", "")
        for metric, part, count in (
            (PEER_MEMORY, "peer memory", gpu_direct.peer_memory),
            (TRANSLATED, "IOMMU", gpu_direct.gpus_translated),
        ):
            value = self._attempt(part, functools.partial(count, self.host))
            if isinstance(value, Fault):
                yield value
            elif value is not None:
                yield metric(float(value))

    def _environments(self) -> Iterator[Sample | Fault]:
        for path in map(str, self.options.environments):
            found = self._attempt(f"environment {path}", functools.partial(self._environment, path))
            if found is None:
                detail = f"there is no Python environment at {path}"
                yield Fault(f"environment {path}", Reason.NOT_FOUND, detail)
            else:
                yield from [found] if isinstance(found, Fault) else _show(found, environment=path)

    def _environment(self, path: str) -> Versions:
        with Root.of_owner(self.host.rootfs, path) as root:
            return self._installations.environment(root, path)

    def _jobs(self) -> Iterator[Sample | Fault]:
        jobs = shares.jobs_with_places(self.context.shared(ProcessTable).refresh())
        before, self._loaded = self._loaded, {}
        for job, members in jobs.items():
            yield from one_of_many(
                f"job {job}", functools.partial(self._of_job, job, members, before)
            )

    def _of_job(
        self, job: str, members: list[TrainingProcess], before: Mapping[tuple[int, int], Libraries]
    ) -> Iterator[Sample | Fault]:
        if (fault := self.context.entering(f"job {job}")) is not None:
            yield fault
        else:
            yield from _show(self._job(members, before), job=job)

    def _job(
        self, members: list[TrainingProcess], before: Mapping[tuple[int, int], Libraries]
    ) -> Versions:
        """Return the software of the first process of a job that has loaded torch.

        If there is none, the software installed for one of its processes. OSError, SourceError.
        """
        members = sorted(members, key=lambda process: (process.pid, process.start) not in before)[
            :_PROCESSES
        ]
        installed: Versions = frozenset()
        for process in members:
            place, key = self.host.proc(str(process.pid)), (process.pid, process.start)
            try:
                loaded = before.get(key) or libraries(place)
                if loaded.replaced is not None:
                    raise SourceError(
                        Reason.NOT_FOUND,
                        f"{loaded.replaced} was replaced on disk: the version that the job has "
                        "loaded is unknown",
                    )
                if loaded.site is not None or not installed:
                    with Root.of_process(self.host, process.pid) as root:
                        installed = running(root, place, process, loaded, self._installations)
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
            if loaded.site is not None:
                # Cached: maps are long, and reading them stops the process for a moment.
                self._loaded[key] = loaded
                break
        return installed

    def _attempt(self, part: str, look: Callable[[], T]) -> T | Fault | None:
        """Return what reading a part of the software gives: None if absent, else its fault."""
        if (fault := self.context.entering(part)) is not None:
            return fault
        try:
            return look()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, ArithmeticError) as error:
            return fault_of(part, error)

    def _first(self, *paths: str) -> str:
        """Return the text of the first of these files. FileNotFoundError if there is none."""
        for path in paths[:-1]:
            if (text := read_existing(self.host.root(path))) is not None:
                return text
        return read(self.host.root(paths[-1]))

    def _driver(self) -> str:
        text = read_existing(self.host.proc("driver/nvidia/version"))
        if text is None:
            return read(self.host.sys("module/nvidia/version")).strip()
        if (version := _found(_DRIVER, text)) is None:
            raise ValueError(f"no version in {text[:80]!r}")
        return version

    def _rdma_core(self) -> str | None:
        """Return the version of rdma-core, from the file name of its libibverbs."""
        for library in ("usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu"):
            with contextlib.suppress(FileNotFoundError):
                return _found(_VERBS, os.readlink(self.host.root(f"{library}/libibverbs.so.1")))
        return None

    def _sysctl(self, name: str) -> str:
        """Return a kernel setting for its fingerprint; empty if this kernel lacks it."""
        return " ".join((read_existing(self.host.proc(f"sys/{name}")) or "").split())

    def _nccl_configuration(self) -> str:
        """Return the node's NCCL settings; empty, not unknown, if there are none."""
        return parse_configuration(read_existing(self.host.root("etc/nccl.conf")) or "")


def _found(pattern: re.Pattern[str], text: str) -> str | None:
    return match[1] if (match := pattern.search(text)) else None


def _show(
    versions: Iterable[tuple[str, str]], environment: str = "", job: str = ""
) -> Iterator[Sample]:
    components: dict[str, list[str]] = {}
    for component, version in sorted(versions):
        components.setdefault(component, []).append(version)
        yield INFO(1, component, version, environment, job)
    for component, found in components.items():
        yield FINGERPRINT(fingerprint("\n".join(found)), component, environment, job)
