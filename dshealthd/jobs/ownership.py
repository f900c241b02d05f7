"""Who owns a job: a process only claims its name, and those of other users are other jobs.

What a process says of its job is anybody's to say. The name belongs to the user whose process the
scheduler has put into that job's cgroup, else to the user of the oldest process that says so; those
of others get a name of their own, which ends in their uid and which no environment can claim.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_SLURM = re.compile(
    rb"^\d+:[^:]*:(?:/system\.slice/(?:[\w-]+_)?slurmstepd\.scope|/slurm[\w-]*/uid_\d+)"
    rb"/job_(\d+)(?:/|$)",
    re.MULTILINE,
)
"""Slurm's cgroups, v2 and v1 (slurm.schedmd.com/cgroup_v2.html), which slurmd makes as root.

Anchored, as a user may make any path below its own slice.
"""
_SUFFIX = "-uid"


class JobClaim(Protocol):
    """A process that says which job it is of."""

    @property
    def claimed(self) -> str:
        """The job's name as the process's environment claims it, whoever owns the job."""

    @property
    def user(self) -> int | None:
        """The real uid of the process that claims the job; None where the kernel does not tell."""

    @property
    def confirmed(self) -> bool:
        """Whether the scheduler's cgroup of the process names the claimed job too."""

    @property
    def pid(self) -> int:
        """The pid of the process that claims the job."""

    @property
    def start(self) -> int:
        """Clock ticks from boot to the start of the process, which it cannot choose."""


def scheduled_in(cgroup: bytes) -> str | None:
    """Return the job that the scheduler has put a process into, by its `/proc/<pid>/cgroup`."""
    match = _SLURM.search(cgroup)
    return None if match is None else f"slurm-{match[1].decode()}"


def owners(claims: Iterable[JobClaim]) -> dict[str, int | None]:
    """Return the owner of each job that one of these processes names."""
    best: dict[str, tuple[tuple[bool, int, int], int | None]] = {}
    for claim in claims:
        # The oldest, as a start cannot be chosen in the past: who names somebody else's job later
        # takes nothing from it.
        rank = (not claim.confirmed, claim.start, claim.pid)
        if claim.claimed not in best or rank < best[claim.claimed][0]:
            best[claim.claimed] = rank, claim.user
    return {job: user for job, (_, user) in best.items()}


def name(claim: JobClaim, known: Mapping[str, int | None]) -> str:
    """Return the name of the job that a process is of, where `known` says who owns each."""
    if known.get(claim.claimed, claim.user) == claim.user:
        return claim.claimed
    return f"{claim.claimed}{_SUFFIX}{'' if claim.user is None else claim.user}"


def claimed(job: str) -> str:
    """Return the name that the processes of a job claim for it."""
    return job.partition(_SUFFIX)[0]
