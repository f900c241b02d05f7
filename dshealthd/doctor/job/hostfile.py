"""The hostfile is one that DeepSpeed accepts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.check import Check, Outcome, Result
from dshealthd.doctor.job_sources.layout import FilterError
from dshealthd.doctor.job_sources.remedies import paste, show
from dshealthd.plural import plural
from dshealthd.printable import printable
from dshealthd.probe.members.membership import MembershipError, parse_hostfile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.job_context import JobContext

SOURCE = "deepspeed/launcher/runner.py, _parse_hostfile"


def applies(context: JobContext) -> bool:
    """Whether a hostfile is given."""
    return context.hostfile is not None


def run(context: JobContext) -> Iterator[Result]:
    """Yield what is wrong with the hostfile's lines, names and slots."""
    hostfile = context.hostfile
    if hostfile is None:
        yield Result(Outcome.UNKNOWN, "no hostfile is given (--hostfile)")
        return
    name = hostfile.name
    if hostfile.value is None:
        yield Result(
            Outcome.UNKNOWN if hostfile.hung else Outcome.CRITICAL,
            # a missing hostfile is not an error to deepspeed, which then runs on one node
            printable(f"{name}: {hostfile.problem}" if hostfile.hung else hostfile.problem),
            remedy=show(name),
            source="deepspeed/launcher/runner.py, fetch_hostfile",
            component=name,
        )
        return
    try:
        members = parse_hostfile(hostfile.value, name)
    except MembershipError as error:
        for line in error.errors:
            yield Result(
                Outcome.CRITICAL,
                printable(line),
                remedy=_show_line(line.removeprefix(f"{name}:").partition(":")[0], name),
                source=SOURCE,
                component=name,
            )
        return
    found = False
    for member in members:
        if not member.slots:
            found = True
            yield Result(
                Outcome.WARNING,
                f"{name}: {member.name} has slots=0 and gets no ranks",
                remedy=paste("grep", "-nw", "-e", member.name, "--", name),
                source=SOURCE,
                component=f"{name}: {member.name}",
            )
    try:
        layout = context.filtered_layout()
    except FilterError as error:
        yield Result(
            Outcome.CRITICAL,
            printable(f"options of deepspeed do not match {name}: {error}"),
            remedy=paste("cat", "--", name),
            source="deepspeed/launcher/runner.py, parse_resource_filter",
            component=name,
        )
        return
    if not found:
        slots = sum(member.slots or 0 for member in members)
        yield Result(
            Outcome.OK,
            f"{name}: {plural(len(members), 'host')} with {plural(slots, 'slot')}, "
            f"{plural(layout.ranks or slots, 'rank')}",
            source=SOURCE,
        )


def _show_line(number: str, name: str) -> str:
    """Return the command that shows a line of the hostfile, or all of it without a line number."""
    if not number.isdecimal():
        return paste("cat", "--", name)
    return paste("sed", "-n", f"{number}p", "--", name)


CHECK: Check[JobContext] = Check(
    "hostfile-unresolvable", "hostfile", "The hostfile is well-formed", run
)
