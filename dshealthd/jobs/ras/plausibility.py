"""Plausibility of RAS answers: finds answers that no intact NCCL gives.

A buffer overrun in NCCL shows as impossible numbers. Such an answer is worthless, and another query
may do more damage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.jobs.ras import policy
from dshealthd.jobs.ras.status import ImpossibleAnswer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dshealthd.jobs.ras.status import Status


def check(status: Status, versions: Iterable[str | None], world_size: int | None) -> None:
    """Raise ImpossibleAnswer if a RAS answer cannot be true.

    `versions` are those that the processes have mapped, `world_size` is the launcher's.
    """
    for communicator in status.communicators:
        name, size = communicator.name or "a communicator", communicator.size
        counted = sum(communicator.states.values())
        if size < 1:
            _refuse(f"{name} has the size {size}")
        if world_size is not None and size > world_size:
            _refuse(f"{name} has {size} ranks, but the job {world_size}")
        if counted > size:
            _refuse(f"{name} has {size} ranks, but {counted} are reported")
        if min(communicator.states.values(), default=0) < 0:
            _refuse(f"{name} has a negative number of ranks")
        named = [lag.rank for lag in communicator.behind]
        named += [trouble.rank for trouble in communicator.troubles]
        if any(not 0 <= rank < size for rank in named):
            _refuse(f"{name} has {size} ranks, but one outside of them is named")
    mapped = set(versions)
    if (
        status.version
        and None not in mapped
        and _number(status.version) not in {_number(version or "") for version in mapped}
    ):
        _refuse(f"NCCL {status.version} answers, but {', '.join(map(str, mapped))} is mapped")
    if status.version and policy.decide(status.version).reason is policy.AskReason.UNSAFE:
        _refuse(f"NCCL {status.version} answers, which is unsafe to query")


def check_change(before: Status, after: Status, world_size: int | None) -> None:
    """Raise ImpossibleAnswer if the next answer of the same processes cannot follow the previous.

    A job may end its communicators at any time, but the one of all ranks ends last: it cannot be
    missing while others remain.
    """
    if world_size is None or not after.communicators:
        return
    had, has = (
        any(communicator.size == world_size for communicator in status.communicators)
        for status in (before, after)
    )
    if had and not has:
        _refuse(f"the communicator of all {world_size} ranks has vanished")


def _number(version: str) -> str:
    """Return a version of NCCL without a build's suffix."""
    return version.partition("+")[0].partition("-")[0]


def _refuse(message: str) -> None:
    raise ImpossibleAnswer(message)
