"""What SELinux does: said, and no fault by itself.

A policy that rejects a job's connections shows in the check `loopback`, which makes one. Nodes that
differ show in the comparison across nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.check import Check, Outcome, Result
from dshealthd.linux import selinux

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.node_context import NodeContext

_SAID = {
    "enforcing": "SELinux is enforcing: what it denies to a job is in `ausearch -m avc -ts recent`",
    "permissive": "SELinux is permissive: it logs and denies nothing",
    "disabled": "SELinux is disabled, or not in this kernel",
}


def _run(context: NodeContext) -> Iterator[Result]:
    try:
        found = selinux.mode(context.host)
    except OSError as error:
        why = f"what SELinux does cannot be read: {error.strerror}"
        yield Result(Outcome.UNKNOWN, why, remedy="getenforce", component="selinux")
        return
    if found not in _SAID:
        why = "the kernel says of SELinux what this version does not understand"
        yield Result(Outcome.UNKNOWN, why, remedy="getenforce", component="selinux")
        return
    yield Result(Outcome.OK, _SAID[found], value=found, component="selinux")


CHECK: Check[NodeContext] = Check("loopback-refused", "selinux", "What SELinux does is known", _run)
