"""The hostfile is one that DeepSpeed accepts, and its hosts can be reached."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from dshealthd.core.text import plural
from dshealthd.doctor import ssh as remote
from dshealthd.doctor.check import Result, check_of, critical, ok, unknown
from dshealthd.doctor.job.context import MAX_HOSTS
from dshealthd.doctor.job.sources import rendezvous
from dshealthd.doctor.remedies import paste, unreadable
from dshealthd.findings.finding import State
from dshealthd.probe.members.hostlist import MembershipError
from dshealthd.probe.members.membership import parse_hostfile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.job.context import JobContext
    from dshealthd.doctor.job.sources.source import Source


SOURCE = "deepspeed/launcher/runner.py, _parse_hostfile"
UNREADABLE = "there is no readable hostfile"
MAX_NAMED = 8
"""Hosts that get their own result; the others are only counted."""


def _lines(context: JobContext, hostfile: Source[str]) -> Iterator[Result]:
    name = hostfile.name
    if hostfile.value is None and context.script is not None:
        yield unknown(f"{name} is not readable here; the job's script may write it")
        return
    if hostfile.value is None:
        # a missing hostfile is not an error to deepspeed, which then runs on one node
        yield unreadable(hostfile, source="deepspeed/launcher/runner.py, fetch_hostfile")
        return
    try:
        members = parse_hostfile(hostfile.value, name)
    except MembershipError as error:
        for line in error.errors:
            yield critical(
                line,
                remedy=_show_line(line.removeprefix(f"{name}:").partition(":")[0], name),
                source=SOURCE,
                component=name,
            )
        return
    slots = sum(member.slots or 0 for member in members)
    yield ok(
        f"{name}: {plural(len(members), 'host')} with {plural(slots, 'slot')}, "
        f"{plural(context.layout.ranks or slots, 'rank')}",
        source=SOURCE,
    )


def _show_line(number: str, name: str) -> str:
    """Return the command that shows a line of the hostfile, or all of it without a line number."""
    if not number.isdecimal():
        return paste("cat", "--", name)
    return paste("sed", "-n", f"{number}p", "--", name)


LINES = check_of(
    lambda job: job.hostfile,
    "no hostfile is given (--hostfile)",
    "hostfile-unresolvable",
    "hostfile",
    "The hostfile is well-formed",
    _lines,
)


def _names(context: JobContext, _hostfile: Source[str]) -> Iterator[Result]:
    names = [name for name, _ in context.layout.hosts] or [one.name for one in context.members]
    if not names:
        yield unknown(UNREADABLE)
        return
    resolved = rendezvous.resolve(names)
    failed = {name: one for name, one in resolved.items() if not one.addresses}
    for name, one in list(failed.items())[:MAX_NAMED]:
        yield Result(
            State.UNKNOWN if one.is_unknown else State.CRITICAL,
            f"{name} does not resolve: {one.problem}",
            remedy=f"getent hosts {name}",
            component=name,
        )
    if rest := list(failed.values())[MAX_NAMED:]:
        yield Result(
            State.UNKNOWN if all(one.is_unknown for one in rest) else State.CRITICAL,
            f"{plural(len(rest), 'more name does', 'more names do')} not resolve, of {len(names)}",
        )
    found = bool(failed)
    first: dict[str, str] = {}
    for name in names:
        for address in resolved[name].addresses:
            other = first.setdefault(address, name)
            if other != name:
                found = True
                yield critical(
                    f"{name} and {other} are the same host ({address}), which would get the ranks"
                    " of both",
                    remedy=f"getent hosts {name} {other}",
                    component=name,
                )
                break
    if not found:
        yield ok(f"every name in the hostfile resolves ({len(names)})")


NAMES = check_of(
    lambda job: job.hostfile,
    UNREADABLE,
    "hostfile-unresolvable",
    "hostfile-names",
    "Names in the hostfile resolve",
    _names,
    deadline=rendezvous.RESOLVE_DEADLINE + 4,
)


def _ssh(context: JobContext, _hostfile: Source[str]) -> Iterator[Result]:
    hosts = dict(context.layout.hosts) or {one.name: one.slots or 0 for one in context.members}
    if not hosts:
        yield unknown(UNREADABLE)
        return
    if shutil.which(context.ssh) is None:
        yield unknown(f"{context.ssh} is not installed here")
        return
    asked = list(hosts)[:MAX_HOSTS]
    answers = remote.query(asked, context.ssh, context.ssh_options)
    bad = [name for name in asked if answers[name].problem]
    for name in bad[:MAX_NAMED]:
        answer = answers[name]
        yield critical(
            f"{name} is not reachable over SSH: {answer.problem}",
            remedy=remote.remedy(name, answer.problem),
            source="deepspeed/launcher/runner.py, which uses SSH without a password",
            component=name,
        )
    if len(bad) > MAX_NAMED:
        yield critical(
            f"{plural(len(bad) - MAX_NAMED, 'more host is', 'more hosts are')} not reachable, "
            f"of {len(asked)}"
        )
    short = False
    for name in asked:
        gpus = answers[name].gpus
        if gpus is not None and gpus < hosts[name]:
            short = True
            yield critical(
                f"{name} has {plural(gpus, 'GPU')} but would get {plural(hosts[name], 'rank')}",
                remedy=f"ssh {name} nvidia-smi -L",
                value=str(gpus),
                limit=str(hosts[name]),
                source=f"hostfile and /proc/driver/nvidia/gpus of {name}",
                component=name,
            )
    if len(hosts) > len(asked):
        yield unknown(f"{len(hosts) - len(asked)} of {len(hosts)} hosts were not checked")
    if not bad and not short:
        known = sum(answers[name].gpus is not None for name in asked)
        yield ok(
            f"{plural(len(asked), 'host accepts', 'hosts accept')} SSH; GPUs counted on {known}"
        )


SSH = check_of(
    lambda job: job.hostfile if job.by_ssh else None,
    UNREADABLE,
    "hostfile-unresolvable",
    "ssh",
    "Hosts accept SSH without a password",
    _ssh,
    deadline=remote.DEADLINE + 5,
)
