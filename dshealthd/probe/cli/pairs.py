"""Probes between pairs of nodes: ask their agents to lead rounds with each other."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dshealthd.core.address import listen_address
from dshealthd.core.options import ConfigError
from dshealthd.probe.cli import report
from dshealthd.probe.members.hostlist import MembershipError
from dshealthd.probe.members.local_membership import hostname, local_addresses, own_name
from dshealthd.probe.members.membership import load
from dshealthd.probe.members.schedule import Cell
from dshealthd.probe.observation import Kind, Outcome, Stage
from dshealthd.probe.options import MembershipOptions, ProbeOptions
from dshealthd.probe.peers.client import PeerClient
from dshealthd.probe.peers.credentials import CredentialError
from dshealthd.probe.peers.protocol import PeerError
from dshealthd.probe.rounds.conclusion import timings_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dshealthd.config.config import Config

LEAD = 28.0
"""Timeout in seconds for another agent to lead a round."""
TRIES = 4
"""Maximum attempts for a pair while one of the two is in another round."""
AT_ONCE = 64
"""Pairs probed at a time."""


@dataclass(frozen=True)
class Ask:
    """A request to the agents."""

    kind: Kind
    steps: tuple[tuple[int, int], ...]


async def between(
    loaded: Config,
    source: str,
    hostfile: str | None,
    kind: Kind,
    steps: tuple[tuple[int, int], ...],
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Have the agents of a hostfile's nodes, or of the configured members, probe each other. Return
    the document. Raises ConfigError.
    """
    from pathlib import Path

    options = loaded.section(ProbeOptions)
    members = (
        MembershipOptions(hostfile=Path(hostfile), name=options.members.name)
        if hostfile is not None
        else options.members
    )
    if not options.peer.listen_address:
        raise ConfigError(
            source,
            [
                (
                    "probe.peer: probes between nodes need the agents' key and address; "
                    "set --config.file to an agent's configuration"
                )
            ],
        )
    try:
        me, names = own_place(loaded, members)
        client = member_client(loaded, me)
    except (MembershipError, CredentialError) as error:
        raise ConfigError(source, list(error.errors)) from error
    ask = Ask(kind, steps)
    entries: list[dict[str, Any]] = []
    try:
        if kind is Kind.GROUP:
            others = [name for name in names if name != me]
            entries.append(await one(client, (*others, me), ask))
            tell(_line(entries[0]))
        else:
            schedule = Cell(names, {})
            pairs: set[frozenset[str]] = set()
            limit = asyncio.Semaphore(AT_ONCE)

            async def pair(group: Sequence[str]) -> None:
                async with limit:
                    # This node's agent refuses calls from its own name, so the other node leads.
                    entry = await one(
                        client, tuple(sorted(group, key=lambda name: name == me)), ask
                    )
                entries.append(entry)
                tell(_line(entry))

            for epoch in range(schedule.cycle):
                groups = [
                    group for group in schedule.groups(epoch) if frozenset(group) not in pairs
                ]
                pairs.update(map(frozenset, groups))
                await asyncio.gather(*map(pair, groups))
    finally:
        await client.close()
    return {
        "kind": kind,
        "members": list(names),
        "outcome": report.worst(Outcome(entry["outcome"]) for entry in entries),
        "units": report.UNITS,
        "rounds": entries,
    }


def own_place(loaded: Config, members: MembershipOptions) -> tuple[str, tuple[str, ...]]:
    """Return this node's name among the members, and all their names. Raises MembershipError. Reads
    files, and may wait for a name server.
    """
    names = load(members).names
    return own_name(names, hostname(), local_addresses(loaded.path.host), members.name), names


def member_client(loaded: Config, me: str) -> PeerClient:
    """Return a client that calls agents as the node `me`; raises CredentialError."""
    _, port = listen_address(loaded.section(ProbeOptions).peer.listen_address)
    return PeerClient(loaded.section(ProbeOptions).peer, me, lambda name: (name, port))


async def one(client: PeerClient, members: tuple[str, ...], ask: Ask) -> dict[str, Any]:
    """Have the first member lead a round with the others, and return the entry of that round."""
    body = {
        "members": members,
        "kind": ask.kind,
        "steps": [{"size": size, "repetitions": repetitions} for size, repetitions in ask.steps],
    }
    entry: dict[str, Any] = {
        "members": list(members),
        "kind": ask.kind,
        "backend": "",
        "stage": Stage.INVITE,
        "late": [],
        "timings": [],
    }
    for attempt in range(TRIES):
        try:
            answer = await client.call(members[0], "lead", body, LEAD)
        except PeerError as error:
            late = [] if error.outcome is Outcome.DECLINED else [members[0]]
            entry |= {"outcome": error.outcome, "reason": error.reason, "late": late}
        else:
            timings = [report.fields(timing) for timing in timings_of(answer["timings"])]
            entry |= {**answer, "late": list(answer["late"]), "timings": timings}
        if entry["reason"] != "already_testing":
            break
        await asyncio.sleep(1.0 + attempt)
    return entry


def show_pairs(document: dict[str, Any]) -> str:
    """Return the matrix of the pairs, and a line for each pair with a problem."""
    cells: dict[frozenset[str], str] = {}
    largest = 0
    for entry in document["rounds"]:
        timing = max(entry["timings"], key=lambda timing: timing["size"], default=None)
        if entry["outcome"] != Outcome.OK or timing is None:
            cells[frozenset(entry["members"])] = str(entry["outcome"])
        else:
            light = "~" if entry["kind"] is Kind.LIGHT else ""
            cells[frozenset(entry["members"])] = f"{light}{timing['busbw'] / 1e9:.3f}"
            largest = max(largest, timing["size"])
    lines = []
    if document["kind"] is not Kind.GROUP:
        what = f"{document['kind']}: bus bandwidth (GB/s) at {largest} bytes; ~ is an echo between the agents, no GPU was used"
        lines.append(report.matrix(document["members"], cells, what))
    for entry in document["rounds"]:
        if document["kind"] is Kind.GROUP and entry["timings"]:
            lines.append(report.table(entry["timings"]))
        if entry["outcome"] != Outcome.OK or entry["reason"] or document["kind"] is Kind.GROUP:
            lines.append(f"# {_line(entry)}")
    lines.append(f"# outcome: {document['outcome']}")
    return "\n".join(lines)


def _line(entry: dict[str, Any]) -> str:
    reason = f", {entry['reason']}" if entry["reason"] else ""
    late = f" (late: {', '.join(entry['late'])})" if entry["late"] else ""
    return f"{' -- '.join(entry['members'])}: {entry['kind']} {entry['outcome']}{reason}{late}"
