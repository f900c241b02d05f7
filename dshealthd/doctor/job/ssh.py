"""Every host in the hostfile accepts SSH without a password and has a GPU for each slot."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from dshealthd.doctor.check import Check, Outcome, Result
from dshealthd.doctor.job_sources import remote
from dshealthd.plural import plural
from dshealthd.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.job_context import JobContext

MAX_HOSTS = 256
"""Maximum number of hosts to check, from the first on."""
MAX_NAMED = 8


def applies(context: JobContext) -> bool:
    """Whether `deepspeed` reaches the hosts over SSH."""
    return context.hostfile is not None and context.by_ssh


def run(context: JobContext) -> Iterator[Result]:
    """Yield hosts that cannot be reached over SSH, and hosts with fewer GPUs than ranks."""
    hosts = dict(context.layout.hosts) or {one.name: one.slots or 0 for one in context.members}
    if not hosts:
        yield Result(Outcome.UNKNOWN, "there is no readable hostfile")
        return
    if shutil.which(context.ssh) is None:
        yield Result(Outcome.UNKNOWN, f"{context.ssh} is not installed here")
        return
    asked = list(hosts)[:MAX_HOSTS]
    answers = remote.look(asked, context.ssh, context.ssh_options)
    bad = [name for name in asked if answers[name].problem]
    for name in bad[:MAX_NAMED]:
        answer = answers[name]
        yield Result(
            Outcome.CRITICAL,
            printable(f"{name} is not reachable over SSH: {answer.problem}"),
            remedy=remote.remedy(name, answer.problem),
            source="deepspeed/launcher/runner.py, which uses SSH without a password",
            component=name,
        )
    if len(bad) > MAX_NAMED:
        yield Result(
            Outcome.CRITICAL,
            f"{plural(len(bad) - MAX_NAMED, 'more host is', 'more hosts are')} not reachable, "
            f"of {len(asked)}",
        )
    short = False
    for name in asked:
        gpus = answers[name].gpus
        if gpus is not None and gpus < hosts[name]:
            short = True
            yield Result(
                Outcome.CRITICAL,
                f"{name} has {plural(gpus, 'GPU')} but would get {plural(hosts[name], 'rank')}",
                remedy=f"ssh {name} nvidia-smi -L",
                value=str(gpus),
                limit=str(hosts[name]),
                source=f"hostfile and /proc/driver/nvidia/gpus of {name}",
                component=name,
            )
    if len(hosts) > len(asked):
        yield Result(
            Outcome.UNKNOWN, f"{len(hosts) - len(asked)} of {len(hosts)} hosts were not checked"
        )
    if not bad and not short:
        known = sum(answers[name].gpus is not None for name in asked)
        yield Result(
            Outcome.OK,
            f"{plural(len(asked), 'host accepts', 'hosts accept')} SSH; GPUs counted on {known}",
        )


CHECK: Check[JobContext] = Check(
    "hostfile-unresolvable",
    "ssh",
    "Hosts accept SSH without a password",
    run,
    deadline=remote.DEADLINE + 5,
)
