"""The mode of SELinux is reported; no mode is a fault by itself.

A policy that rejects a job's connections shows in the check `loopback`, which makes one. Nodes that
differ show in the comparison across nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.check import Check, Outcome, Result
from dshealthd.linux import security

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.node_context import NodeContext

_SAID = {
    "enforcing": "SELinux is enforcing: `ausearch -m avc -ts recent` shows what it denies to a job",
    "permissive": "SELinux is permissive: it logs but denies nothing",
    "disabled": "SELinux is disabled, or this kernel does not have it",
}


def _run(context: NodeContext) -> Iterator[Result]:
    try:
        found = security.mode(context.host)
    except OSError as error:
        why = f"the SELinux mode cannot be read: {error.strerror}"
        yield Result(Outcome.UNKNOWN, why, remedy="getenforce", component="selinux")
        return
    if found not in _SAID:
        why = "the kernel reports an SELinux mode that this version does not know"
        yield Result(Outcome.UNKNOWN, why, remedy="getenforce", component="selinux")
        return
    yield Result(Outcome.OK, _SAID[found], value=found, component="selinux")


CHECK: Check[NodeContext] = Check("loopback-refused", "selinux", "The SELinux mode is known", _run)
