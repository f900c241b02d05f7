"""The checks of a job, listed by hand in the order in which people read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.job import (
    batch,
    checkpoint,
    config_conflicts,
    config_deprecated,
    config_file,
    config_keys,
    hostfile,
    hostfile_names,
    launcher,
    master_address,
    master_port,
    memory,
    nccl,
    offload_path,
    ranks,
    ssh,
    transports,
)

if TYPE_CHECKING:
    from dshealthd.doctor.check import Check
    from dshealthd.doctor.job_context import JobContext

_MODULES = (
    *(config_file, config_keys, config_deprecated, config_conflicts, batch),
    *(hostfile, hostfile_names, ssh),
    *(launcher, ranks, master_address, master_port, nccl, transports),
    *(checkpoint, memory, offload_path),
)
CHECKS: tuple[Check[JobContext], ...] = tuple(module.CHECK for module in _MODULES)


def applicable(context: JobContext) -> tuple[Check[JobContext], ...]:
    """Return the checks for which the user gave something to check.

    The others would find nothing, which is unknown, not ok.
    """
    return tuple(module.CHECK for module in _MODULES if module.applies(context))
