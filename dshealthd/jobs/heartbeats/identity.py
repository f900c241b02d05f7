"""The identity of who sends heartbeats: job and rank, by `/proc` and never by what it says.

A process's environment is read under the lock of its memory, which one that hangs in a driver may
hold: this blocks.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from dshealthd.core.host import read, read_bytes
from dshealthd.jobs.environment import job, launch, parse_environ
from dshealthd.jobs.processes import ENVIRON_LIMIT, TrainingProcess, namespace, standing
from dshealthd.linux.credentials import parse_real_user
from dshealthd.linux.process_stat import parse_stat

if TYPE_CHECKING:
    from dshealthd.core.host import Host


class UnidentifiedSender(enum.StrEnum):
    """Why it is not known which job and rank a sender is of."""

    PENDING = "pending"
    """It is being looked at. One that stays so hangs, and whoever reads its environment."""
    NO_LAUNCHER = "no_launcher"
    """It has no launcher's variables in the environment that it was started with."""
    PERMISSION_DENIED = "permission_denied"
    """Environments of other users take CAP_SYS_PTRACE."""
    GONE = "gone"
    """It has ended, and its pid may be another's."""
    UNREADABLE = "unreadable"
    """What the kernel says of it is not understood."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A process whose place in a job is known."""

    process: TrainingProcess
    image: tuple[int, int]
    """Changes if another program takes the process's place."""


Answer: TypeAlias = "Identity | UnidentifiedSender"


def identify(host: Host, pid: int, user: int) -> Answer:
    """Return the sender's identity, if it is one of `user`. Blocks where the process hangs."""
    place = host.proc(str(pid))
    try:
        stat = parse_stat(read_bytes(f"{place}/stat", 4096))
        if parse_real_user(read_bytes(f"{place}/status", 8192)) != user:
            return UnidentifiedSender.GONE  # the pid is another's by now
        environment = parse_environ(read_bytes(f"{place}/environ", ENVIRON_LIMIT))
        network = namespace(host, pid)
        name = job(environment, _boot(host) + network)
        confirmed = standing(place, name)[1]
        # Once more: all that was read in between is of one process only if it is the same at both
        # ends.
        if parse_stat(read_bytes(f"{place}/stat", 4096)).image != stat.image:
            return UnidentifiedSender.GONE
    except (FileNotFoundError, ProcessLookupError):
        return UnidentifiedSender.GONE
    except PermissionError:
        return UnidentifiedSender.PERMISSION_DENIED
    except (OSError, ValueError):
        return UnidentifiedSender.UNREADABLE
    place_in_job = launch(environment)
    if place_in_job is None:
        return UnidentifiedSender.NO_LAUNCHER
    process = TrainingProcess(
        pid,
        stat.start,
        stat.parent,
        name,
        place_in_job,
        environment,
        user=user,
        confirmed=confirmed,
        network=network,
    )
    return Identity(process, stat.image)


def same(host: Host, identity: Identity) -> bool:
    """Tell whether the sender is still the process that was identified. Does not block."""
    try:
        return (
            parse_stat(read_bytes(host.proc(f"{identity.process.pid}/stat"), 4096)).image
            == identity.image
        )
    except (OSError, ValueError):
        return False


def _boot(host: Host) -> str:
    """Return what only this machine has, for senders' jobs; empty where the kernel does not tell.

    `ProcessTable` names jobs by the same.
    """
    try:
        return read(host.proc("sys/kernel/random/boot_id")).strip()
    except OSError:
        return ""
