"""The checks of a job, listed by hand in the order in which people read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.job import (
    batch,
    checkpoint,
    config,
    config_conflicts,
    hostfile,
    launcher,
    memory,
    nccl,
    rendezvous,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from dshealthd.doctor.check import Check
    from dshealthd.doctor.job.context import JobContext

_CHECKS: tuple[tuple[Check[JobContext], Callable[[JobContext], bool]], ...] = (
    (config.FILE, config.applies),
    (config.KEYS, config.keys_apply),
    (config.DEPRECATED, config.keys_apply),
    (config_conflicts.CHECK, config_conflicts.applies),
    (batch.CHECK, batch.applies),
    (hostfile.LINES, hostfile.applies),
    (hostfile.NAMES, hostfile.applies),
    (hostfile.SSH, hostfile.ssh_applies),
    (launcher.CHECK, launcher.applies),
    (launcher.RANKS, launcher.ranks_apply),
    (rendezvous.ADDRESS, rendezvous.address_applies),
    (rendezvous.PORT, rendezvous.port_applies),
    (nccl.VARIABLES, nccl.variables_applies),
    (nccl.TRANSPORTS, nccl.transports_applies),
    (checkpoint.CHECK, checkpoint.applies),
    (memory.MEMORY, memory.memory_applies),
    (memory.OFFLOAD, memory.offload_applies),
)
"""Each check, and whether the user gave something for it."""
CHECKS = tuple(check for check, _ in _CHECKS)


def applicable(context: JobContext) -> tuple[Check[JobContext], ...]:
    """Return the checks for which the user gave something to check.

    The others would find nothing, which is unknown, not ok.
    """
    return tuple(check for check, applies in _CHECKS if applies(context))
