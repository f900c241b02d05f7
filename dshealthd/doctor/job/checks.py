"""The checks of a job, listed by hand in the order in which people read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.job import (
    batch,
    checkpoint,
    config,
    config_conflicts,
    hostfile,
    kubernetes,
    launcher,
    nccl,
    rendezvous,
)

if TYPE_CHECKING:
    from dshealthd.doctor.check import Check
    from dshealthd.doctor.job.context import JobContext

CHECKS: tuple[Check[JobContext], ...] = (
    *(config.FILE, config.KEYS, config_conflicts.CHECK, batch.CHECK),
    *(hostfile.LINES, hostfile.NAMES, hostfile.SSH, launcher.CHECK, launcher.RANKS),
    kubernetes.MANIFEST,
    *(rendezvous.ADDRESS, rendezvous.PORT, nccl.VARIABLES, nccl.TRANSPORTS),
    checkpoint.CHECK,
)


def applicable(context: JobContext) -> tuple[Check[JobContext], ...]:
    """Return the checks for which the user gave something to check."""
    return tuple(check for check in CHECKS if check.applies(context))
