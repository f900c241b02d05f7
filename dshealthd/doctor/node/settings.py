"""Kernel settings that break training jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dshealthd.core.host import read_int
from dshealthd.doctor.check import Check, Outcome, Result

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.node_context import NodeContext


class Setting(NamedTuple):
    """A sysctl, its acceptable range, and the effect of a value outside it."""

    name: str
    least: int
    most: int
    effect: str
    good: int
    source: str


SETTINGS = (
    Setting(
        "vm.max_map_count", 65530, 1 << 31,
        "CUDA and data loaders map many files and fail with ENOMEM", 262144,
        "default of the kernel, 65530",
    ),
    Setting(
        "vm.overcommit_memory", 0, 1,
        "fork() of a large training process and CUDA's address space reservations fail", 0,
        "Documentation/mm/overcommit-accounting.rst: 2 never overcommits",
    ),
    Setting(
        "kernel.pid_max", 32768, 1 << 22,
        "each thread needs an ID, and ranks and data loaders have thousands", 4194304,
        "default of the kernel, 32768",
    ),
    Setting(
        "net.core.somaxconn", 128, 1 << 31,
        "ranks that connect to the master at the same time are refused or time out", 4096,
        "default of the kernel up to 5.3, 128",
    ),
)  # fmt: skip


def _run(context: NodeContext) -> Iterator[Result]:
    values: dict[str, int] = {}
    bad = False
    for setting in SETTINGS:
        path = f"sys/{setting.name.replace('.', '/')}"
        try:
            value = read_int(context.host.proc(path))
        except OSError as error:
            yield Result(
                Outcome.UNKNOWN, f"{setting.name}: {error.strerror}", component=setting.name
            )
            continue
        values[setting.name] = value
        if not setting.least <= value <= setting.most:
            bad = True
            bound = setting.least if value < setting.least else setting.most
            yield Result(
                Outcome.WARNING,
                f"{setting.name} is {value}: {setting.effect}",
                remedy=f"sudo sysctl -w {setting.name}={setting.good}",
                value=str(value),
                limit=str(bound),
                source=setting.source,
                component=setting.name,
            )
    if values and not bad:
        yield Result(
            Outcome.OK, "read " + ", ".join(f"{name}={value}" for name, value in values.items())
        )


CHECK: Check[NodeContext] = Check(
    "node-drift", "kernel-settings", "Kernel settings do not break training jobs", _run
)
