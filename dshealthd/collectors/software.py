"""Versions of the software that trainings use.

Of the node, of the configured Python environments, and of those that jobs run in.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from dshealthd.core.collector import (
    Collector,
    CollectorOptions,
    Fault,
    Reason,
    Sample,
    SourceError,
    Worker,
    gauge,
)
from dshealthd.core.host import read, read_bytes
from dshealthd.core.options import Duration, option
from dshealthd.core.result import os_reason
from dshealthd.core.watched_file import signature
from dshealthd.jobs import shares
from dshealthd.jobs.installation import Installations
from dshealthd.jobs.loaded import libraries
from dshealthd.jobs.loaded import versions as running
from dshealthd.jobs.processes import ProcessTable
from dshealthd.linux import pci_topology, selinux
from dshealthd.linux.firewall_configuration import firewall_configuration
from dshealthd.linux.process_files import Root

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from dshealthd.core.collector import Context
    from dshealthd.core.watched_file import Signature
    from dshealthd.jobs.installation import Versions
    from dshealthd.jobs.loaded import Libraries
    from dshealthd.jobs.processes import TrainingProcess

P = ParamSpec("P")
T = TypeVar("T")

INFO = gauge(
    "dshealthd_software_info",
    "1 for each version in use: of the node (environment and job empty), of a configured "
    "environment, or of what the processes of "
    "a training job have loaded or, before they load it, have installed.",
    "component",
    "version",
    "environment",
    "job",
)
FINGERPRINT = gauge(
    "dshealthd_software_fingerprint",
    "48 bits of a digest of the version or the settings, for comparison across nodes: equal "
    "if they are, and meaningless otherwise. The "
    "kernel command line is taken without what is a node's own, such as root=.",
    "component",
    "environment",
    "job",
)

_DRIVER = re.compile(r"Kernel Module(?:\s+for\s+\S+)?\s+(\d+\.\d+(?:\.\d+)?)\b")
_OFED = re.compile(r"\b((?:MLNX_OFED_LINUX|OFED-internal|MLNX_EN)-\d[\d.-]*\d)")
_VERBS = re.compile(r"libibverbs\.so\.1\.\d+\.(\d[\w.]*)")
_CUDA = re.compile(r'"cuda"\s*:\s*\{[^{}]*"version"\s*:\s*"([^"]+)"')
_OWN_ARGUMENTS = (
    "BOOT_IMAGE",
    "root",
    "rootflags",
    "resume",
    "initrd",
    "ip",
    "ifname",
    "BOOTIF",
    "systemd.machine_id",
    "rd",
    "netroot",
)
_SYSCTLS = (
    *(
        "kernel/numa_balancing",
        "kernel/pid_max",
        "kernel/shmmax",
        "fs/nr_open",
        "fs/inotify/max_user_instances",
    ),
    *(
        "vm/nr_hugepages",
        "vm/overcommit_memory",
        "vm/max_map_count",
        "vm/swappiness",
        "vm/zone_reclaim_mode",
    ),
    *(
        "net/core/somaxconn",
        "net/core/rmem_max",
        "net/core/wmem_max",
        "net/ipv4/tcp_rmem",
        "net/ipv4/tcp_wmem",
    ),
    *(
        "net/ipv4/tcp_tw_reuse",
        "net/ipv4/tcp_fin_timeout",
        "net/ipv4/ip_local_port_range",
        "net/ipv4/tcp_mtu_probing",
    ),
    *(
        "net/ipv4/conf/all/arp_ignore",
        "net/ipv4/conf/all/arp_announce",
        "net/ipv4/conf/all/rp_filter",
    ),
)
"""What tuning guides for DeepSpeed, NCCL and RoCE set.

Without what the kernel derives from the size of the memory.
"""
_PROCESSES = 8
"""How many processes of a job are asked for the libraries that they have loaded, until one has
loaded torch.
"""


def parse_os_release(text: str) -> str | None:
    """Return name and version of `/etc/os-release`, such as `debian 12`."""
    fields = {
        key: value.strip("\"'")
        for key, _, value in (line.partition("=") for line in text.splitlines())
    }
    return " ".join(fields[key] for key in ("ID", "VERSION_ID") if key in fields) or None


def parse_dpkg_version(status: bytes, package: str) -> str | None:
    """Return the version of an installed package from `/var/lib/dpkg/status`."""
    entry = (
        (b"\n" + status)
        .partition(b"\nPackage: " + package.encode() + b"\n")[2]
        .partition(b"\n\n")[0]
    )
    fields = dict(
        line.split(b": ", 1) for line in entry.split(b"\n") if line[:1] != b" " and b": " in line
    )
    installed = fields.get(b"Status", b"").endswith(b" installed")
    return (
        fields[b"Version"].decode(errors="replace") if installed and b"Version" in fields else None
    )


def parse_command_line(text: str) -> str:
    """Return a kernel's arguments as software settings in order of the alphabet, without those that
    name this node's own disks and addresses.
    """
    return " ".join(
        sorted(
            word
            for word in text.split()
            if word.partition("=")[0].partition(".")[0] not in _OWN_ARGUMENTS
        )
    )


def parse_configuration(text: str) -> str:
    """Return the lines of a file of settings, for its fingerprint, in order of the alphabet,
    without comments and empty ones.
    """
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return "\n".join(sorted(line for line in lines if line))


def fingerprint(text: str) -> int:
    """Return 48 bits of a digest of software or settings: a number that a float holds exactly."""
    return int.from_bytes(
        hashlib.blake2b(text.encode(errors="replace"), digest_size=6).digest(), "big"
    )


@dataclass(frozen=True, kw_only=True)
class SoftwareOptions(CollectorOptions):
    """Options of the software versions."""

    interval: Duration = option("1m", "Time from one sample to the next.", minimum="100ms")
    environments: tuple[Path, ...] = option(
        [], "Prefixes of the Python environments to look at, such as /opt/venv."
    )
    max_jobs: int = option(
        8,
        "Training jobs whose environments are looked at: users take turns, the oldest first.",
        minimum=0,
        maximum=100,
    )

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield the options of software versions whose values cannot be used, and why."""
        for path in self.environments:
            if not path.is_absolute():
                yield "environments", f"{path} must be an absolute path"


class Software(Collector):
    """Reads files that may lie on a network file system.

    Runs nothing and imports nothing of what it looks at.
    """

    worker = Worker.STORAGE

    Options = SoftwareOptions

    def __init__(self, options: SoftwareOptions, context: Context) -> None:
        """Look at nothing yet."""
        super().__init__(options, context)
        self._installations = Installations()
        self._loaded: dict[tuple[int, int], Libraries] = {}
        self._packages: tuple[Signature, str | None] | None = None

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield versions and fingerprints of software.

        What is not installed is left out, and what cannot be read is a fault.
        """
        self._installations.begin()
        known, last = False, None
        for item in itertools.chain(self._node(), self._environments(), self._jobs()):
            known, last = (True, last) if isinstance(item, Sample) else (known, item)
            yield item
        if last is not None and not known:
            raise SourceError(last.reason, last.detail)

    def _node(self) -> Iterator[Sample | Fault]:
        """Yield the versions of software that a node has once: kernel, driver, OS, libraries."""
        versions: dict[str, Callable[[], str | None]] = {
            "kernel": lambda: read(self.host.proc("sys/kernel/osrelease")).strip(),
            "driver": self._driver,
            "os": lambda: parse_os_release(self._first("etc/os-release", "usr/lib/os-release")),
            "mlx5_core": lambda: read(self.host.sys("module/mlx5_core/version")).strip(),
            "ofed": lambda: _found(_OFED, self._first("usr/bin/ofed_info")),
            "rdma_core": self._rdma_core,
            "selinux": lambda: selinux.mode(self.host),
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
            "topology": lambda: pci_topology.describe(self.host),
        }
        for component, look in (versions | settings).items():
            text = self._attempt(component, look)
            if isinstance(text, Fault):
                yield text
            elif text is not None and component in versions:
                yield from _show([(component, text)])
            elif text is not None:
                yield FINGERPRINT(fingerprint(text), component, "", "")

    def _environments(self) -> Iterator[Sample | Fault]:
        """Yield what software the configured environments have."""
        for path in map(str, self.options.environments):
            found = self._attempt(f"environment {path}", self._environment, path)
            if found is None:
                yield Fault(
                    f"environment {path}",
                    Reason.NOT_FOUND,
                    f"there is no Python environment at {path}",
                )
            else:
                yield from [found] if isinstance(found, Fault) else _show(found, environment=path)

    def _environment(self, path: str) -> Versions:
        with Root.of_owner(self.host.rootfs, path) as root:
            return self._installations.environment(root, path)

    def _jobs(self) -> Iterator[Sample | Fault]:
        """Yield what software the jobs run with."""
        jobs, _ = shares.jobs(self.context.shared(ProcessTable).refresh(), self.options.max_jobs)
        before, self._loaded = self._loaded, {}
        for job, members in jobs.items():
            found = self._attempt(f"job {job}", self._job, f"job {job}", members, before)
            if found is not None:
                yield from [found] if isinstance(found, Fault) else _show(found, job=job)

    def _job(
        self, part: str, members: list[TrainingProcess], before: Mapping[tuple[int, int], Libraries]
    ) -> Versions | Fault:
        """Return what software the first process of a job runs with that has loaded torch.

        If there is none, what is installed for one of them.
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
                    return Fault(
                        part,
                        Reason.NOT_FOUND,
                        f"{loaded.replaced} was replaced on disk: what the job has loaded is "
                        "unknown",
                    )
                if loaded.site is not None or not installed:
                    with Root.of_process(self.host, process.pid) as root:
                        installed = running(root, place, process, loaded, self._installations)
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
            if loaded.site is not None:
                self._loaded[key] = (
                    # it stays loaded: maps are long, and reading them stops the process for a
                    # moment
                    loaded
                )
                break
        return installed

    def _attempt(
        self, part: str, look: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T | Fault | None:
        """Return what a look at one part of the software gives.

        None if there is no such thing, and a fault if it cannot be read.
        """
        if (fault := self.context.entering(part)) is not None:
            return fault
        try:
            return look(*args, **kwargs)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            return Fault(part, os_reason(error), str(error))
        except ValueError as error:
            return Fault(part, Reason.MALFORMED, str(error))

    def _first(self, *paths: str) -> str:
        """Return the text of the first of these version files of the host that exists.

        FileNotFoundError if none does.
        """
        for path in paths[:-1]:
            try:
                return read(self.host.root(path))
            except FileNotFoundError:
                continue
        return read(self.host.root(paths[-1]))

    def _driver(self) -> str:
        try:
            text = read(self.host.proc("driver/nvidia/version"))
        except FileNotFoundError:
            return read(self.host.sys("module/nvidia/version")).strip()
        if (version := _found(_DRIVER, text)) is None:
            message = f"no version in {text[:80]!r}"
            raise ValueError(message)
        return version

    def _rdma_core(self) -> str | None:
        """Return the version of libibverbs, which is rdma-core's.

        As packaged (Debian), else as its file name has it.
        """
        place = self.host.root("var/lib/dpkg/status")
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(place)
            stamp = signature(status)
            if self._packages is None or self._packages[0] != stamp:
                self._packages = (
                    stamp,
                    parse_dpkg_version(read_bytes(place, 64 << 20), "libibverbs1"),
                )
            return self._packages[1]
        for library in ("usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu"):
            with contextlib.suppress(FileNotFoundError):
                return _found(_VERBS, os.readlink(self.host.root(f"{library}/libibverbs.so.1")))
        return None

    def _sysctl(self, name: str) -> str:
        """Return a kernel setting for its fingerprint; nothing where there is none."""
        try:
            return " ".join(read(self.host.proc(f"sys/{name}")).split())
        except FileNotFoundError:
            return ""

    def _nccl_configuration(self) -> str:
        """Return the settings that NCCL takes from the node; that there are none is known, too."""
        try:
            return parse_configuration(read(self.host.root("etc/nccl.conf")))
        except FileNotFoundError:
            return ""


def _found(pattern: re.Pattern[str], text: str) -> str | None:
    return match[1] if (match := pattern.search(text)) else None


def _show(
    versions: Iterable[tuple[str, str]], environment: str = "", job: str = ""
) -> Iterator[Sample]:
    """Yield one sample for each version of software and one fingerprint for each component."""
    components: dict[str, list[str]] = {}
    for component, version in sorted(versions):
        components.setdefault(component, []).append(version)
        yield INFO(1, component, version, environment, job)
    for component, found in components.items():
        yield FINGERPRINT(fingerprint("\n".join(found)), component, environment, job)
