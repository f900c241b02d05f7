"""Limits of processes that break training jobs."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dshealthd.core.host import Host, read, read_bytes
from dshealthd.core.options import Bytes
from dshealthd.core.text import plural
from dshealthd.doctor.check import Result, warning
from dshealthd.doctor.options import DoctorOptions
from dshealthd.doctor.snapshot_check import snapshot_check
from dshealthd.linux.credentials import capabilities
from dshealthd.linux.process_limits import ProcessLimits, parse_limits

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext

CAP_IPC_LOCK = 14
"""Its bit in a set of capabilities; linux/capability.h."""
LAUNCHERS = frozenset(("slurmd", "slurmstepd"))


def _launchers(host: Host) -> Iterator[tuple[str, ProcessLimits]]:
    """Yield the daemons here that start jobs, with the limits that jobs inherit."""
    seen = set()
    for pid in filter(str.isdecimal, os.listdir(host.procfs)):  # /proc has them in order
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
    # The capability lifts the limit, but not for other users' jobs; root has none in a container.
    lifted = not slurm and capabilities()[0] >> CAP_IPC_LOCK & 1
    if context.has_infiniband and limits.locked < options.locked_memory_bytes and not lifted:
        yield warning(
            f"{who} may lock {limits.locked / (1 << 20):g} MiB of memory: RDMA pins every buffer, "
            "and NCCL fails with ibv_reg_mr or ENOMEM",
            remedy="systemctl edit slurmd  # [Service] LimitMEMLOCK=infinity"
            if slurm
            else "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/90-memlock.conf"
            "  # of a container: --ulimit memlock=-1, or the capability IPC_LOCK",
            value=str(Bytes(limits.locked)),
            limit=str(options.locked_memory_bytes),
            source="doctor.locked_memory_bytes",
            component=f"memlock of {who}",
        )


def _problems(context: NodeContext) -> Iterator[Result]:
    yield from _judge(context, "this shell", _own())
    for name, limits in _launchers(context.host):
        yield from _judge(context, name, limits)


PROCESS_LIMITS = snapshot_check(
    "shared-memory",
    "process-limits",
    "Limits of open files and locked memory suffice for a job",
    *("gpu_bus", "infiniband"),
    alerts=(),
    problems=_problems,
)
