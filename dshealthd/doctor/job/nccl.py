"""NCCL variables are read, fit this node, and disable no transport."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from dshealthd.core.collector import Context
from dshealthd.doctor.check import Result, check_of, ok, unknown, warning
from dshealthd.doctor.node.findings import MEANINGS
from dshealthd.findings.finding import State
from dshealthd.jobs import environment_problems as problems
from dshealthd.jobs.environment import nccl_variables
from dshealthd.jobs.nccl.names import Misnomer
from dshealthd.jobs.nccl.settings import Misfit
from dshealthd.jobs.network_devices import NetworkDevices

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dshealthd.doctor.job.context import JobContext


WORDS: Mapping[str, str] = {
    **MEANINGS,
    problems.Problem.DISABLED: "disables InfiniBand, which works on this node",
}

_CRITICAL = frozenset(
    {*Misfit, *problems.Problem, Misnomer.MISSPELT}
    - {problems.Problem.DISABLED, problems.Problem.EXPOSED}
)
"""Problems that make the job fail or run without the setting it wants."""

SOURCE = "names and ranges of NCCL 2.30.7"

_HARMLESS = frozenset({Misnomer.RENAMED, Misnomer.UNKNOWN})
"""The old name still works, and a plugin may read any."""
_OF_NODE = frozenset({problems.Problem.ABSENT, problems.Problem.DOWN})
"""Problems that only the devices of the job's own nodes show."""
_OF_TRANSPORTS = frozenset({"NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE"})
"""Variables that the check `transports` covers in more detail."""


UNKNOWN_ENVIRONMENT = "the environment has no variable that concerns training"


def _variables(context: JobContext, _variables: object) -> Iterator[Result]:
    have = {name: value for name, value in context.settings.items() if "$" not in value}
    devices = NetworkDevices(Context(host=context.host, monotonic=time.monotonic, wall=time.time))
    count = 0
    for variable, problem in _problems(context, have, devices):
        if problem in _HARMLESS:
            continue
        words = WORDS[problem]
        if problem is problems.Problem.DISABLED:
            if variable in _OF_TRANSPORTS:
                continue  # `transports` reports it
            if not any(devices.ports().values()):
                if not context.runs_elsewhere or context.nodes == 1 or _has_other_network(have):
                    continue  # right on nodes without adapters
                words = (
                    f"disables InfiniBand and RoCE between the {context.nodes} nodes of the"
                    " job; right only where they have neither"
                )
        count += 1
        value = have.get(variable, "")
        shown = f"{variable}={value[:60]}" if value else variable
        if problem in _OF_NODE and context.runs_elsewhere:
            yield unknown(
                f"{shown}: this node has no such working device, but the job runs on others, with "
                "GPUs; check it there",
                component=variable,
            )
            continue
        yield Result(
            State.CRITICAL if problem in _CRITICAL else State.WARNING,
            f"{shown} {words}",
            remedy=f"unset {variable}" if variable in have else "env | grep NCCL",
            value=value[:60],
            source=SOURCE,
            component=variable,
        )
    for fault in devices.faults:
        count += 1
        yield unknown(f"{fault.part}: {fault.detail}", component=fault.part)
    if not count:
        known = sorted(name for name in have if "NCCL" in name)
        yield ok(f"{', '.join(known[:8]) or 'no variable'}: NCCL reads it as set")


def _problems(
    context: JobContext, have: Mapping[str, str], devices: NetworkDevices
) -> Iterator[tuple[str, str]]:
    names = nccl_variables(b"\0".join(f"{name}=".encode() for name in have))
    yield from sorted(problems.names(names))
    yield from problems.values(have)
    several = context.nodes > 1
    if text := have.get("NCCL_SOCKET_IFNAME", ""):
        interfaces = devices.interfaces(os.getpid())
        yield from problems.interface(text, interfaces, many_nodes=several)
    if text := have.get("NCCL_IB_HCA", ""):
        yield from problems.adapters(text, devices.ports())


def _has_other_network(have: Mapping[str, str]) -> bool:
    """Whether variables say that the nodes have a network of another kind, such as EFA."""
    return any(name.startswith("FI_") or name == "NCCL_NET_PLUGIN" for name in have)


VARIABLES = check_of(
    lambda job: job.settings or job.command,
    UNKNOWN_ENVIRONMENT,
    "nccl-environment",
    "nccl-variables",
    "NCCL's variables are read and fit this node",
    _variables,
    applies=lambda job: any(name.startswith(("NCCL_", "TORCH_NCCL_")) for name in job.settings),
)


def _transports(context: JobContext, _environment: object) -> Iterator[Result]:
    have = context.settings
    found = [
        variable
        for variable, problem in problems.values(have)
        if problem is problems.Problem.DISABLED and variable in _OF_TRANSPORTS
    ]
    for variable in found:
        kind = "shared memory" if variable == "NCCL_SHM_DISABLE" else "NVLink and PCIe peer-to-peer"
        yield warning(
            f"{variable}={have[variable][:40]} disables {kind} between the GPUs of a node",
            remedy=f"unset {variable}",
            value=have[variable][:40],
            source="NCCL 2.30.7, docs/userguide/source/env.rst",
            component=variable,
        )
    if not found:
        yield ok("no variable disables peer-to-peer or shared memory")


TRANSPORTS = check_of(
    lambda job: job.settings or job.command,
    UNKNOWN_ENVIRONMENT,
    "p2p-disabled",
    "transports",
    "Transports between GPUs are enabled",
    _transports,
    applies=lambda job: _OF_TRANSPORTS & job.settings.keys(),
)
