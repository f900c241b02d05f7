"""The names in the hostfile resolve, each to a different host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.check import Check, Outcome, Result
from dshealthd.doctor.job_sources import rendezvous
from dshealthd.plural import plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.job_context import JobContext

MAX_NAMED = 8
"""Hosts that get their own result; the others are only counted."""


def applies(context: JobContext) -> bool:
    """Whether a hostfile is given."""
    return context.hostfile is not None


def run(context: JobContext) -> Iterator[Result]:
    """Yield names in the hostfile that do not resolve, and names of the same host."""
    names = [name for name, _ in context.layout.hosts] or [one.name for one in context.members]
    if not names:
        yield Result(Outcome.UNKNOWN, "there is no readable hostfile")
        return
    resolved = rendezvous.resolve(names)
    failed = {name: one for name, one in resolved.items() if not one.addresses}
    for name, one in list(failed.items())[:MAX_NAMED]:
        yield Result(
            Outcome.UNKNOWN if one.is_unknown else Outcome.CRITICAL,
            f"{name} does not resolve: {one.problem}",
            remedy=f"getent hosts {name}",
            component=name,
        )
    if rest := list(failed.values())[MAX_NAMED:]:
        yield Result(
            Outcome.UNKNOWN if all(one.is_unknown for one in rest) else Outcome.CRITICAL,
            f"{plural(len(rest), 'more name does', 'more names do')} not resolve, of {len(names)}",
        )
    found = bool(failed)
    first: dict[str, str] = {}
    for name in names:
        for address in resolved[name].addresses:
            other = first.setdefault(address, name)
            if other != name:
                found = True
                yield Result(
                    Outcome.CRITICAL,
                    f"{name} and {other} are the same host ({address}), which would get the ranks"
                    " of both",
                    remedy=f"getent hosts {name} {other}",
                    component=name,
                )
                break
    if not found:
        yield Result(Outcome.OK, f"every name in the hostfile resolves ({len(names)})")


CHECK: Check[JobContext] = Check(
    "hostfile-unresolvable",
    "hostfile-names",
    "Names in the hostfile resolve",
    run,
    deadline=rendezvous.RESOLVE_DEADLINE + 4,
)
