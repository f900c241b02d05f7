"""Who owns a job: a process only claims its name, and other users' processes are other jobs.

Any process can claim any job name. The name belongs to the user whose process the scheduler has put
into that job's cgroup, or else to the user of the oldest process that claims it. Other users'
processes get a name of their own, which ends in their uid and which no environment can claim.

Without the scheduler's cgroup, who claims a name before its job has it. The name is not taken from
both then: a later claim would rename a job that runs, which starts its hang detection anew, and
whoever repeats that keeps a hang from being seen. Nor do only confirmed jobs have the plain name:
ranks that are started over SSH have no cgroup, and would be another job than those beside srun.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Protocol

_SLURM = re.compile(
    rb"^\d+:[^:]*:(?:/system\.slice/(?:[\w-]+_)?slurmstepd\.scope|/slurm[\w-]*/uid_\d+)"
    rb"/job_(\d+)(?:/|$)",
    re.MULTILINE,
)
"""Slurm's cgroups, v2 and v1 (slurm.schedmd.com/cgroup_v2.html), which slurmd creates as root.

Anchored, because a user may create any path below their own slice.
"""
_SUFFIX = "-uid"


class JobClaim(Protocol):
    """A process that claims to belong to a job."""

    @property
    def claimed(self) -> str:
        """The job's name in the process's environment, whoever owns the job."""

    @property
    def user(self) -> int | None:
        """The real uid of the process; None if unknown."""

    @property
    def confirmed(self) -> bool:
        """Whether the scheduler's cgroup of the process names the claimed job too."""

    @property
    def pid(self) -> int:
        """The pid of the process."""

    @property
    def start(self) -> int:
        """Clock ticks from boot to the start of the process; it cannot forge this."""


def scheduled_in(cgroup: bytes) -> str | None:
    """Return the job that the scheduler has put a process into, from its `/proc/<pid>/cgroup`."""
    match = _SLURM.search(cgroup)
    return None if match is None else f"slurm-{match[1].decode()}"


def owners(claims: Iterable[JobClaim]) -> dict[str, int | None]:
    """Return the owner of each job that one of these processes claims."""
    found: dict[str, int | None] = {}
    # The oldest, because a process cannot start in the past: a later claim on somebody else's job
    # takes nothing from it.
    for claim in sorted(claims, key=lambda one: (not one.confirmed, one.start, one.pid)):
        found.setdefault(claim.claimed, claim.user)
    return found


def name(claim: JobClaim, known: Mapping[str, int | None]) -> str:
    """Return the name of the job that a process belongs to; `known` has the owner of each job."""
    if known.get(claim.claimed, claim.user) == claim.user:
        return claim.claimed
    return f"{claim.claimed}{_SUFFIX}{'' if claim.user is None else claim.user}"


def claimed_name(job: str) -> str:
    """Return the name that the processes of a job claim."""
    return job.partition(_SUFFIX)[0]
