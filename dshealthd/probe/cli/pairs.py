"""Probes between pairs of nodes: ask their agents to lead rounds with each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dshealthd.core.options import ConfigError
from dshealthd.core.sockets import listen_address
from dshealthd.probe.cli import report
from dshealthd.probe.members.hostlist import MembershipError
from dshealthd.probe.members.local_membership import hostname, own_name
from dshealthd.probe.members.membership import load
from dshealthd.probe.members.schedule import Timetable
from dshealthd.probe.observation import Observation, Outcome, RoundKind, Stage
from dshealthd.probe.options import MembershipOptions, ProbeOptions
from dshealthd.probe.peers.client import ANSWER, PeerClient
from dshealthd.probe.peers.credentials import CredentialError
from dshealthd.probe.peers.protocol import PeerError
from dshealthd.probe.peers.server import HANDLER_TIMEOUT

if TYPE_CHECKING:
    from dshealthd.config.config import Config

LEAD = HANDLER_TIMEOUT + ANSWER
"""Timeout in seconds for another agent to lead a round, or to say that it takes too long."""
TRIES = 4
"""Maximum attempts for a pair while one of the two is in another round."""
AT_ONCE = 64
"""Pairs probed at a time."""


async def probe_pairs(
    loaded: Config,
    source: str,
    hostfile: str | None,
    kind: RoundKind,
    steps: tuple[tuple[int, int], ...],
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Have the agents of a hostfile's nodes, or of the configured members, probe each other. Return
    the document. Raises ConfigError.
    """
    options = loaded.section(ProbeOptions)
    members = (
        MembershipOptions(hostfile=Path(hostfile), name=options.members.name)
        if hostfile is not None
        else options.members
    )
    if not options.peer.listen_address:
        message = (
            "probe.peer: probes between nodes need the agents' key and address; set "
            "--config.file to an agent's configuration"
        )
        raise ConfigError(source, [message])
    try:
        names = load(members).names
        me = own_name(names, hostname(), members.name)
        client = member_client(loaded, me)
    except MembershipError as error:
        raise ConfigError(source, list(error.errors)) from error
    except CredentialError as error:
        raise ConfigError(source, [str(error)]) from error
    entries: list[dict[str, Any]] = []
    schedule = Timetable(names, {})
    limit = asyncio.Semaphore(AT_ONCE)

    async def probe(pair: Sequence[str]) -> None:
        # This node's agent refuses calls from its own name, so the other node leads.
        leader, member = sorted(pair, key=lambda name: name == me)
        async with limit:
            entry = await one(client, leader, member, kind, steps)
        entries.append(entry)
        tell(_line(entry))

    try:
        for epoch in range(schedule.cycle):
            await asyncio.gather(*map(probe, schedule.groups(epoch)))
    finally:
        await client.close()
    return {
        "kind": kind,
        "members": list(names),
        "outcome": report.worst(Outcome(entry["outcome"]) for entry in entries),
        "units": report.UNITS,
        "rounds": entries,
    }


def member_client(loaded: Config, me: str) -> PeerClient:
    """Return a client that calls agents as the node `me`; raises CredentialError."""
    _, port = listen_address(loaded.section(ProbeOptions).peer.listen_address)
    return PeerClient(loaded.section(ProbeOptions).peer, me, lambda name: (name, port))


async def one(
    client: PeerClient,
    leader: str,
    member: str,
    kind: RoundKind,
    steps: tuple[tuple[int, int], ...],
) -> dict[str, Any]:
    """Have one node lead a round with another, and return the entry of that round."""
    body = {"members": (leader, member), "kind": kind, "steps": steps}
    entry: dict[str, Any] = {
        "members": [leader, member],
        "kind": kind,
        "backend": "",
        "stage": Stage.INVITE,
        "late": [],
        "timings": [],
    }
    for attempt in range(TRIES):
        try:
            answer = await client.call(leader, "lead", body, LEAD)
        except PeerError as error:
            known = error.outcome not in {Outcome.DECLINED, Outcome.INCONCLUSIVE}
            late = [leader] if known else []
            entry |= {"outcome": error.outcome, "reason": error.reason, "late": late}
        else:
            found: Observation = answer["observation"]
            entry |= {
                **{name: getattr(found, name) for name in ("kind", "backend", "outcome", "stage")},
                "late": list(found.late),
                "reason": found.reason,
                "timings": [report.timing_fields(timing) for timing in found.timings],
            }
            if (told := found.told) is not None:
                ratios = [{"peer": peer, "ratio": ratio} for peer, ratio in told.pairs.items()]
                entry["report"] = {"parts": told.parts, "uplink": told.uplink, "pairs": ratios}
                entry["report"] |= {} if told.node is None else {"node": told.node}
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
            light = "~" if entry["kind"] is RoundKind.LIGHT else ""
            cells[frozenset(entry["members"])] = f"{light}{timing['busbw'] / 1e9:.3f}"
            largest = max(largest, timing["size"])
    what = (
        f"{document['kind']}: bus bandwidth (GB/s) at {largest} bytes; ~ is an echo between "
        "the agents, no GPU was used"
    )
    problems = [
        f"# {_line(entry)}"
        for entry in document["rounds"]
        if entry["outcome"] != Outcome.OK or entry["reason"]
    ]
    matrix = report.matrix(document["members"], cells, what)
    return "\n".join([matrix, *problems, f"# outcome: {document['outcome']}"])


def _line(entry: dict[str, Any]) -> str:
    reason = f", {entry['reason']}" if entry["reason"] else ""
    late = f" (late: {', '.join(entry['late'])})" if entry["late"] else ""
    return f"{' -- '.join(entry['members'])}: {entry['kind']} {entry['outcome']}{reason}{late}"
