"""Why launches are not counted: in the kernel at all, or of one rank."""

from __future__ import annotations

import enum
import errno

from dshealthd.core.host import Host, read


class Obstacle(enum.StrEnum):
    """The values of the label `reason`."""

    DENIED = "denied"
    """The kernel permits it to nobody with the rights of this process."""
    LOCKDOWN = "lockdown"
    """The kernel is locked down for confidentiality."""
    UNSUPPORTED = "unsupported"
    """The kernel or machine lacks what it takes."""
    NO_LIBRARY = "no_library"
    """The rank has loaded no NCCL yet."""
    STATIC_LIBRARY = "static_library"
    """NCCL is linked into PyTorch, and exports no functions."""
    SINGLE_STEPPED = "single_stepped"
    """A breakpoint would cost the rank ten times as much."""
    DEBUGGER = "debugger"
    """A debugger or tracer is attached."""
    OVER_BUDGET = "over_budget"
    """It launches too often: left alone for ten minutes."""
    TOO_MANY_RANKS = "too_many_ranks"
    """More ranks than places."""
    TOO_MANY_COMMUNICATORS = "too_many_communicators"
    """More communicators than places: what is counted is not all."""
    UNREADABLE = "unreadable"
    """Its library cannot be read, or is not the one on disk."""


class Refused(Exception):
    """Launches of a rank, or all launches, cannot be counted; the message says why in detail."""

    def __init__(self, reason: Obstacle, detail: str = "") -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def refused_by_kernel(host: Host, error: OSError, what: str) -> Refused:
    """Return why the kernel has refused a call that needs rights or features."""
    if error.errno not in {errno.EPERM, errno.EACCES}:
        return Refused(Obstacle.UNSUPPORTED, f"{what}: {error.strerror}")
    try:
        locked = "[confidentiality]" in read(host.sys("kernel/security/lockdown"))
    except OSError:  # not mounted, or a kernel without lockdown
        locked = False
    return Refused(Obstacle.LOCKDOWN if locked else Obstacle.DENIED, f"{what}: {error.strerror}")
