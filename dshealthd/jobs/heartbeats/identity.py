"""The identity of a heartbeat sender: its job and rank according to `/proc`, never its own claim.

This blocks: reading a process's environment takes its memory lock, which a process that hangs in a
driver may hold.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from dshealthd.core.host import Host, read_bytes
from dshealthd.jobs.processes import TrainingProcess, boot_id, read_process, read_stat
from dshealthd.linux.credentials import parse_real_user

Answer: TypeAlias = "Identity | UnidentifiedSender"


class UnidentifiedSender(enum.StrEnum):
    """Why a sender's job and rank are unknown."""

    PENDING = "pending"
    """It is being identified. If it stays so, it hangs, and so does whatever reads its environment.
    """
    NO_LAUNCHER = "no_launcher"
    """The environment that it was started with has no launcher's variables."""
    PERMISSION_DENIED = "permission_denied"
    """Environments of other users need CAP_SYS_PTRACE."""
    GONE = "gone"
    """It has ended, and its pid may have been reused."""
    UNREADABLE = "unreadable"
    """The kernel's answer is not understood, or the agent has no descriptor or memory for it. Tried
    again, as that may pass.
    """
    OLDER_LAYOUT = "older_layout"
    """Its training began with a release of dshealthd whose heartbeats this agent cannot read."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A process whose place in a job is known."""

    process: TrainingProcess
    image: tuple[int, int]
    """Changes if the process is replaced or runs another program."""


def identify(host: Host, pid: int, user: int) -> Answer:
    """Return the sender's identity, if it belongs to `user`. Blocks if the process hangs."""
    try:
        stat = read_stat(host, pid)
        if parse_real_user(read_bytes(host.proc(f"{pid}/status"))) != user:
            return UnidentifiedSender.GONE  # the pid was reused
        process = read_process(host, pid, stat, boot_id(host))
        # Once more: everything read in between belongs to one process only if both ends agree.
        if read_stat(host, pid).image != stat.image:
            return UnidentifiedSender.GONE
    except (FileNotFoundError, ProcessLookupError):
        return UnidentifiedSender.GONE
    except PermissionError:
        return UnidentifiedSender.PERMISSION_DENIED
    except (OSError, ValueError, ArithmeticError):
        return UnidentifiedSender.UNREADABLE
    if process is None:
        return UnidentifiedSender.NO_LAUNCHER
    return Identity(process, stat.image)


def same(host: Host, identity: Identity) -> bool:
    """Return whether the sender is still the identified process, as long as nothing else is known.
    Does not block.
    """
    try:
        return read_stat(host, identity.process.pid).image == identity.image
    except (FileNotFoundError, ProcessLookupError):
        return False
    except (OSError, ValueError, ArithmeticError):  # such as without a free descriptor
        return True
