"""Settings of the kernel and limits of processes that break training jobs."""

from __future__ import annotations

import contextlib
import os
import resource
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.core.host import integer, read, read_bytes
from dshealthd.core.options import Bytes
from dshealthd.core.text import plural
from dshealthd.doctor.check import Check, Result, ok, unknown, warning
from dshealthd.doctor.options import DoctorOptions
from dshealthd.doctor.snapshot_check import snapshot_check
from dshealthd.linux.process_limits import ProcessLimits, parse_limits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.core.host import Host
    from dshealthd.doctor.node_context import NodeContext

LAUNCHERS = frozenset(("slurmd", "slurmstepd"))


class Setting(NamedTuple):
    """A sysctl, its acceptable range, and the effect of a value outside it."""

    name: str
    least: int
    most: int
    effect: str
    good: int
    source: str


SETTINGS = (
    Setting(
        "vm.max_map_count", 65530, 1 << 31,
        "CUDA and data loaders map many files and fail with ENOMEM", 262144,
        "default of the kernel, 65530",
    ),
    Setting(
        "vm.overcommit_memory", 0, 1,
        "fork() of a large training process and CUDA's address space reservations fail", 0,
        "Documentation/mm/overcommit-accounting.rst: 2 never overcommits",
    ),
    Setting(
        "kernel.pid_max", 32768, 1 << 22,
        "each thread needs an ID, and ranks and data loaders have thousands", 4194304,
        "default of the kernel, 32768",
    ),
    Setting(
        "net.core.somaxconn", 128, 1 << 31,
        "ranks that connect to the master at the same time are refused or time out", 4096,
        "default of the kernel up to 5.3, 128",
    ),
)  # fmt: skip


def _run(context: NodeContext) -> Iterator[Result]:
    values: dict[str, int] = {}
    bad = False
    for setting in SETTINGS:
        path = f"sys/{setting.name.replace('.', '/')}"
        try:
            file = context.host.proc(path)
            value = integer(file, read(file).strip(), 0)
        except OSError as error:
            yield unknown(f"{setting.name}: {error.strerror}", component=setting.name)
            continue
        values[setting.name] = value
        if not setting.least <= value <= setting.most:
            bad = True
            bound = setting.least if value < setting.least else setting.most
            yield warning(
                f"{setting.name} is {value}: {setting.effect}",
                remedy=f"sudo sysctl -w {setting.name}={setting.good}",
                value=str(value),
                limit=str(bound),
                source=setting.source,
                component=setting.name,
            )
    if values and not bad:
        yield ok("read " + ", ".join(f"{name}={value}" for name, value in values.items()))


KERNEL_SETTINGS: Check[NodeContext] = Check(
    "node-drift", "kernel-settings", "Kernel settings do not break training jobs", _run
)


def _launchers(host: Host) -> Iterator[tuple[str, ProcessLimits]]:
    """Yield the daemons here that start jobs, with the limits that jobs inherit."""
    seen = set()
    for pid in sorted(filter(str.isdecimal, os.listdir(host.procfs)), key=int):
        with contextlib.suppress(OSError, ValueError, ArithmeticError):  # it has ended
            name = read(host.proc(f"{pid}/comm")).strip()
            if name in LAUNCHERS and name not in seen:
                seen.add(name)
                yield name, parse_limits(read_bytes(host.proc(f"{pid}/limits")))


def _own() -> ProcessLimits:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    infinity = resource.RLIM_INFINITY
    return ProcessLimits(
        float("inf") if files == infinity else files, float("inf") if locked == infinity else locked
    )


def _judge(context: NodeContext, who: str, limits: ProcessLimits) -> Iterator[Result]:
    options = context.config.section(DoctorOptions)
    slurm = who in LAUNCHERS
    if context.has_gpus and limits.files < options.open_files:
        yield warning(
            f"{who} may open {plural(limits.files, 'file')}: a training job's data loaders and "
            "sockets run out of them at random",
            remedy="systemctl edit slurmd  # [Service] LimitNOFILE=1048576"
            if slurm
            else "ulimit -n $(ulimit -Hn)",
            value=f"{limits.files:g}",
            limit=str(options.open_files),
            source="doctor.open_files",
            component=f"nofile of {who}",
        )
    # CAP_IPC_LOCK lifts the limit for root, but not for other users' jobs
    lifted = not slurm and os.geteuid() == 0
    if context.has_infiniband and limits.locked < options.locked_memory_bytes and not lifted:
        yield warning(
            f"{who} may lock {limits.locked / (1 << 20):g} MiB of memory: RDMA pins every buffer, "
            "and NCCL fails with ibv_reg_mr or ENOMEM",
            remedy="systemctl edit slurmd  # [Service] LimitMEMLOCK=infinity"
            if slurm
            else "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/90-memlock.conf",
            value=str(Bytes(limits.locked)),
            limit=str(options.locked_memory_bytes),
            source="doctor.locked_memory_bytes",
            component=f"memlock of {who}",
        )


def _problems(context: NodeContext) -> Iterator[Result]:
    yield from _judge(context, "this shell", _own())
    for name, limits in _launchers(context.host):
        yield from _judge(context, name, limits)


def _summary(_context: NodeContext) -> str:
    own = _own()
    locked = "all memory" if own.locked == float("inf") else f"{own.locked / (1 << 20):g} MiB"
    return f"user {os.geteuid()} may open {plural(own.files, 'file')} and lock {locked}"


PROCESS_LIMITS = snapshot_check(
    "shared-memory",
    "process-limits",
    "Limits of open files and locked memory",
    ("gpu_bus", "infiniband"),
    _summary,
    _problems,
    alerts="none of the alerts",
)
