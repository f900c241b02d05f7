"""Problems of a rank's environment: names, values, rank numbers, GPUs, interfaces, adapters.

It is checked on its own, against its node, and against the other ranks.
"""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

from dshealthd.jobs.environment import NCCL_COMMON, Launch, launched_by, natural, visible
from dshealthd.jobs.nccl.names import misnomer
from dshealthd.jobs.nccl.settings import (
    SelectedName,
    Selection,
    number,
    parse_selection,
    value_problem,
)
from dshealthd.jobs.ras.address import ras_exposed

if TYPE_CHECKING:
    from dshealthd.jobs.network_devices import Interfaces, Ports

Finding: TypeAlias = tuple[str, str]
"""A variable and its problem: a `Problem`, `Misfit` or `Misnomer`.

Both are bounded, whatever a user sets.
"""

_ONE_ADAPTER = re.compile(r".*_\d+")
_BRIDGE = re.compile(r"docker|virbr\d|lxcbr\d|lxdbr\d|br-[0-9a-f]{12}$")
_SHARED = ("torchrun", "deepspeed")
"""Launchers that give all ranks of a node the same GPUs.

Other launchers may give each rank one GPU, which it sees as number 0.
"""


class Problem(enum.StrEnum):
    """Problems of a rank's environment other than those of names and values of variables."""

    BEYOND = "beyond"
    """RANK or LOCAL_RANK is not below the number of ranks or of visible GPUs."""
    REPEATED = "repeated"
    """CUDA_VISIBLE_DEVICES lists a GPU twice, and CUDA shows none."""
    ABSENT = "absent"
    """It names an interface, adapter or GPU that this node does not have."""
    DOWN = "down"
    """It names an interface or adapter that is down."""
    LOOPBACK = "loopback"
    """It leaves a run of several nodes only an interface inside the node, such as lo."""
    DISABLED = "disabled"
    """It disables a transport."""
    EXPOSED = "exposed"
    """It opens NCCL's RAS port, which has no authentication, to other hosts."""
    UNORDERED = "unordered"
    """CUDA_DEVICE_ORDER lets CUDA number different GPUs by its guess of their speed, not in the
    order of NVML and of the alerts.
    """
    DIFFERS = "differs"
    """Most ranks of the run on this node have another value."""


def names(have: Iterable[str]) -> Iterator[Finding]:
    """Yield problems of names of NCCL variables: misspelt, renamed, retired, unknown."""
    return (found for name in have if (found := misnomer(name)) is not None)


def values(settings: Mapping[str, str]) -> Iterator[Finding]:
    """Yield problems of values of NCCL variables: rejected, or that disable a transport or open a
    port.
    """
    for name, value in settings.items():
        if (found := value_problem(name, value)) is not None:
            yield name, found
    if number(settings.get("NCCL_P2P_DISABLE", "")) == 1:
        yield "NCCL_P2P_DISABLE", Problem.DISABLED
    elif (level := settings.get("NCCL_P2P_LEVEL", "")) == "LOC" or (
        level[:1].isdecimal() and number(level) == 0
    ):
        yield "NCCL_P2P_LEVEL", Problem.DISABLED
    for name in ("NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"):
        if number(settings.get(name, "")):
            yield name, Problem.DISABLED
    if settings.get("NCCL_NET", "").lower() == "socket":
        yield "NCCL_NET", Problem.DISABLED
    if ras_exposed(settings):
        yield "NCCL_RAS_ADDR", Problem.EXPOSED


def place(
    launch: Launch, environment: Mapping[str, str], gpus: int | None, *, mixed: bool = False
) -> Iterator[Finding]:
    """Yield problems of RANK, LOCAL_RANK and CUDA_VISIBLE_DEVICES of a rank.

    `gpus` is the number of GPUs of the node; None or 0 if unknown. `mixed` says that they are of
    several models.
    """
    if mixed and environment.get("CUDA_DEVICE_ORDER", "").strip() != "PCI_BUS_ID":
        yield "CUDA_DEVICE_ORDER", Problem.UNORDERED
    if launch.world_size is not None and launch.rank >= launch.world_size:
        yield "RANK", Problem.BEYOND
    limits = [] if (local := natural(environment.get("LOCAL_WORLD_SIZE"))) is None else [local]
    if gpus:
        listed = environment.get("CUDA_VISIBLE_DEVICES")
        seen = visible(",".join(map(str, range(gpus))) if listed is None else listed, gpus)
        if seen.repeated:
            yield "CUDA_VISIBLE_DEVICES", Problem.REPEATED
        if seen.missing:
            yield "CUDA_VISIBLE_DEVICES", Problem.ABSENT
        if len(seen.devices) > 1 or (seen.devices and launched_by(environment, launch) in _SHARED):
            limits.append(len(seen.devices))
    if launch.local_rank is not None and limits and launch.local_rank >= min(limits):
        yield "LOCAL_RANK", Problem.BEYOND


def interface(text: str, interfaces: Interfaces, *, many_nodes: bool) -> Iterator[Finding]:
    """Yield problems of NCCL_SOCKET_IFNAME; NCCL ignores a value of one character."""
    if len(text) < 2:  # noqa: PLR2004 - as in ncclFindInterfaces
        return
    selection = parse_selection(text)
    taken = {name: runs for name, runs in interfaces.items() if selection.covers(name)}
    others = {name for name, runs in taken.items() if runs is not False and not _of_node(name)}
    entries = () if selection.exclude else selection.entries
    if many_nodes and entries and all(_of_node(one.name) for one in entries):
        yield "NCCL_SOCKET_IFNAME", Problem.LOOPBACK  # also where this node has none of them
    elif not taken:
        yield "NCCL_SOCKET_IFNAME", Problem.ABSENT
    elif all(runs is False for runs in taken.values()):
        yield "NCCL_SOCKET_IFNAME", Problem.DOWN
    elif many_nodes and (not others or (selection.exclude and "lo" in taken)):
        # With the variable set, NCCL excludes only what it lists, and bootstrap takes the first
        # remaining interface: loopback comes before all others (ncclFindInterfaces, 2.30.7).
        yield "NCCL_SOCKET_IFNAME", Problem.LOOPBACK


def _of_node(name: str) -> bool:
    """Return whether an interface leads to no other node, by its name.

    NCCL passes over lo and docker unless it is told to use them (ncclFindInterfaces, "^docker,lo");
    docker's own networks (br- and their identifier) and those of libvirt and LXC are such bridges,
    too.
    """
    return name == "lo" or _BRIDGE.match(name) is not None


def adapters(text: str, ports: Ports) -> Iterator[Finding]:
    """Yield problems of NCCL_IB_HCA: no working port is selected, or an entry for one adapter
    matches no working port.

    An entry that is only a prefix may be meant for other nodes, if other entries match.
    """
    selection = parse_selection(text)
    if not (ports if selection.exclude else selection.entries):
        return
    chosen: list[Ports] = [{port: runs for port, runs in ports.items() if selection.covers(*port)}]
    if not selection.exclude:
        chosen += [
            {port: runs for port, runs in ports.items() if selection.names(entry, *port)}
            for entry in selection.entries
            if _names_one(selection, entry)
        ]
    for problem in sorted(set[Problem]().union(*map(_broken, chosen))):  # the same each time
        yield "NCCL_IB_HCA", problem


def differing(settings: Mapping[int, Mapping[str, str]]) -> Iterator[tuple[int, Finding]]:
    """Yield the ranks that differ from most ranks here in a setting that all must share.

    `settings` are the environments by rank.
    """
    for name in NCCL_COMMON:
        found = {rank: values.get(name) for rank, values in sorted(settings.items())}
        if len(set(found.values())) > 1:
            usual = Counter(found.values()).most_common(1)[0][0]
            yield from (
                (rank, (name, Problem.DIFFERS)) for rank, value in found.items() if value != usual
            )


def _names_one(selection: Selection, entry: SelectedName) -> bool:
    return (
        selection.exact or entry.port is not None or _ONE_ADAPTER.fullmatch(entry.name) is not None
    )


def _broken(ports: Ports) -> set[Problem]:
    """Return the problem of these ports as a whole: absent or down; empty if one may work."""
    if not ports:
        return {Problem.ABSENT}
    return {Problem.DOWN} if all(active is False for active in ports.values()) else set()
