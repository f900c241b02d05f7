"""The hostfile is one that DeepSpeed accepts, and its hosts can be reached."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dshealthd.core.text import plural
from dshealthd.doctor import ssh as remote
from dshealthd.doctor.check import Result, check_of, critical, unknown
from dshealthd.doctor.job.context import MAX_HOSTS, JobContext
from dshealthd.doctor.job.sources import rendezvous
from dshealthd.doctor.remedies import paste, unreadable
from dshealthd.probe.members.hostlist import MembershipError
from dshealthd.probe.members.membership import parse_hostfile

if TYPE_CHECKING:
    from dshealthd.doctor.job.sources.source import Source


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
        parse_hostfile(hostfile.value, name)
    except MembershipError as error:
        for line in error.errors:
            number = line.removeprefix(f"{name}:").partition(":")[0]
            show = paste("sed", "-n", f"{number}p", "--", name)
            yield critical(
                line,
                show if number.isdecimal() else paste("cat", "--", name),
                source="deepspeed/launcher/runner.py, _parse_hostfile",
                component=name,
            )


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
    resolved = rendezvous.resolve(names) if names else {}
    failed = {name: one for name, one in resolved.items() if not one.addresses}
    for name, one in list(failed.items())[:MAX_NAMED]:
        make = unknown if one.is_unknown else critical
        text = f"{name} does not resolve: {one.problem}"
        yield make(text, f"getent hosts {name}", component=name)
    if rest := list(failed.values())[MAX_NAMED:]:
        make = unknown if all(one.is_unknown for one in rest) else critical
        more = plural(len(rest), "more name does", "more names do")
        yield make(f"{more} not resolve, of {len(names)}")
    first: dict[str, str] = {}
    for name in names:
        others = [first.setdefault(address, name) for address in resolved[name].addresses]
        if other := next((other for other in others if other != name), ""):
            yield critical(
                f"{name} and {other} are the same host, which would get the ranks of both",
                f"getent hosts {name} {other}",
                component=name,
            )


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
    if not hosts or shutil.which(context.ssh) is None:
        yield unknown(f"{context.ssh} is not installed here" if hosts else UNREADABLE)
        return
    asked = list(hosts)[:MAX_HOSTS]
    port = context.deepspeed.options.get("ssh-port") if context.deepspeed else None
    answers = remote.query(asked, context.ssh, ("-p", port) if port else ())
    bad = [name for name in asked if answers[name].problem]
    for name in bad[:MAX_NAMED]:
        problem = answers[name].problem
        yield critical(
            f"{name} is not reachable over SSH: {problem}",
            remote.remedy(name, problem),
            source="deepspeed/launcher/runner.py, which uses SSH without a password",
            component=name,
        )
    if more := len(bad[MAX_NAMED:]):
        shown = plural(more, "more host is", "more hosts are")
        yield critical(f"{shown} not reachable, of {len(asked)}")
    for name in asked:
        gpus = answers[name].gpus
        if gpus is not None and gpus < hosts[name]:
            yield critical(
                f"{name} has {plural(gpus, 'GPU')} but would get {plural(hosts[name], 'rank')}",
                f"ssh {name} nvidia-smi -L",
                source=f"hostfile and /proc/driver/nvidia/gpus of {name}",
                component=name,
            )
    if len(hosts) > len(asked):
        yield unknown(f"{len(hosts) - len(asked)} of {len(hosts)} hosts were not checked")


SSH = check_of(
    lambda job: job.hostfile if job.by_ssh else None,
    UNREADABLE,
    "hostfile-unresolvable",
    "ssh",
    "Hosts accept SSH without a password, and have a GPU for each rank",
    _ssh,
    deadline=remote.DEADLINE + 5,
)
