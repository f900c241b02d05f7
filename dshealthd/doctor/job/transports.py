"""No variable disables the transports between the GPUs of a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.check import Check, Outcome, Result
from dshealthd.doctor.job.nccl import TRANSPORTS
from dshealthd.jobs import environment_problems as problems
from dshealthd.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.job_context import JobContext


def applies(context: JobContext) -> bool:
    """Whether a variable is set that can disable transports."""
    return bool(TRANSPORTS & context.variables.keys())


def run(context: JobContext) -> Iterator[Result]:
    """Yield the variables that disable transports between GPUs."""
    if context.environment is None:
        yield Result(Outcome.UNKNOWN, "the environment of the job is unknown (--environment)")
        return
    have = context.variables
    found = [
        variable
        for variable, problem in problems.values(have)
        if problem is problems.Problem.DISABLED and variable in TRANSPORTS
    ]
    for variable in found:
        kind = "shared memory" if variable == "NCCL_SHM_DISABLE" else "NVLink and PCIe peer-to-peer"
        yield Result(
            Outcome.WARNING,
            printable(
                f"{variable}={have[variable][:40]} disables {kind} between the GPUs of a node"
            ),
            remedy=f"unset {variable}",
            value=printable(have[variable][:40]),
            source="NCCL 2.30.7, docs/userguide/source/env.rst",
            component=variable,
        )
    if not found:
        yield Result(Outcome.OK, "no variable disables peer-to-peer or shared memory")


CHECK: Check[JobContext] = Check(
    "p2p-disabled", "transports", "Transports between GPUs are enabled", run
)
