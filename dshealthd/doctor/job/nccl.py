"""NCCL variables are read, fit this node, and disable no transport."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from dshealthd.core.collector import Context
from dshealthd.doctor.check import Result, check_of, critical, unknown, warning
from dshealthd.doctor.node.findings import MEANINGS
from dshealthd.jobs import environment_problems as problems
from dshealthd.jobs.environment import nccl_variables
from dshealthd.jobs.environment_problems import Problem
from dshealthd.jobs.nccl.names import Misnomer
from dshealthd.jobs.nccl.settings import Misfit
from dshealthd.jobs.network_devices import NetworkDevices

if TYPE_CHECKING:
    from dshealthd.doctor.job.context import JobContext

_CRITICAL = frozenset({*Misfit, *Problem, Misnomer.MISSPELT} - {Problem.DISABLED, Problem.EXPOSED})
"""Problems that make the job fail or run without the setting it wants."""
SOURCE = "names and ranges of NCCL 2.30.7"
_HARMLESS = frozenset({Misnomer.RENAMED, Misnomer.UNKNOWN})
"""The old name still works, and a plugin may read any."""
_OF_NODE = frozenset({Problem.ABSENT, Problem.DOWN})
"""Problems that only the devices of the job's own nodes show."""
_BETWEEN_GPUS = {
    "NCCL_P2P_DISABLE": "NVLink and PCIe peer-to-peer",
    "NCCL_P2P_LEVEL": "NVLink and PCIe peer-to-peer",
    "NCCL_SHM_DISABLE": "shared memory",
}
"""What variables disable between the GPUs of a node; the check `transports` reports them."""
UNKNOWN_ENVIRONMENT = "the environment has no variable that concerns training"


def _variables(context: JobContext, _settings: object) -> Iterator[Result]:
    have = {name: value for name, value in context.settings.items() if "$" not in value}
    devices = NetworkDevices(Context(host=context.host, monotonic=time.monotonic, wall=time.time))
    for variable, problem in _problems(context, have, devices):
        words = MEANINGS.get(problem, "")
        if problem is Problem.DISABLED and variable not in _BETWEEN_GPUS:
            words = _without_infiniband(context, have, is_here=any(devices.ports().values()))
        if problem in _HARMLESS or not words:
            continue
        value = have.get(variable, "")
        shown = f"{variable}={value[:60]}" if value else variable
        if problem in _OF_NODE and context.runs_elsewhere:
            yield unknown(
                f"{shown}: this node has no such working device, but the job runs on others, with "
                "GPUs; check it there",
                component=variable,
            )
            continue
        make = critical if problem in _CRITICAL else warning
        remedy = f"unset {variable}" if variable in have else "env | grep NCCL"
        yield make(f"{shown} {words}", remedy, source=SOURCE, component=variable)
    for fault in devices.faults:
        yield unknown(f"{fault.part}: {fault.detail}", component=fault.part)


def _without_infiniband(context: JobContext, have: Mapping[str, str], *, is_here: bool) -> str:
    """Return why a job should not disable InfiniBand; empty where it has none, or another network
    such as EFA.
    """
    if is_here:
        return "disables InfiniBand, which works on this node"
    has_other = any(name.startswith("FI_") or name == "NCCL_NET_PLUGIN" for name in have)
    if not context.runs_elsewhere or context.nodes == 1 or has_other:
        return ""
    return (
        f"disables InfiniBand and RoCE between the {context.nodes} nodes of the job; right only"
        " where they have neither"
    )


def _problems(
    context: JobContext, have: Mapping[str, str], devices: NetworkDevices
) -> Iterator[tuple[str, str]]:
    names = nccl_variables(b"\0".join(f"{name}=".encode() for name in have))
    yield from sorted(problems.names(names))
    yield from problems.values(have)
    several = context.nodes > 1
    if text := have.get("NCCL_SOCKET_IFNAME", ""):
        interfaces = devices.interfaces(os.getpid(), "")
        yield from problems.interface(text, interfaces, many_nodes=several)
    if text := have.get("NCCL_IB_HCA", ""):
        yield from problems.adapters(text, devices.ports())


VARIABLES = check_of(
    lambda job: job.settings or job.command,
    UNKNOWN_ENVIRONMENT,
    "nccl-environment",
    "nccl-variables",
    "NCCL reads its variables as they are set, and they fit this node",
    _variables,
    applies=lambda job: any(name.startswith(("NCCL_", "TORCH_NCCL_")) for name in job.settings),
)


def _transports(context: JobContext, _settings: object) -> Iterator[Result]:
    have = context.settings
    for variable, problem in problems.values(have):
        if problem is Problem.DISABLED and variable in _BETWEEN_GPUS:
            yield warning(
                f"{variable}={have[variable][:40]} disables {_BETWEEN_GPUS[variable]} between the"
                " GPUs of a node",
                f"unset {variable}",
                source="NCCL 2.30.7, docs/userguide/source/env.rst",
                component=variable,
            )


TRANSPORTS = check_of(
    lambda job: job.settings or job.command,
    UNKNOWN_ENVIRONMENT,
    "p2p-disabled",
    "transports",
    "No variable disables a transport between GPUs",
    _transports,
    applies=lambda job: _BETWEEN_GPUS.keys() & job.settings.keys(),
)
