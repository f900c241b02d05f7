"""The other nodes of a job, asked right before it starts: echoes between their agents.

The light round of `dshealthd.probe`, without a GPU, from this node to some others. A node blames
nobody but itself: it is cut off where no packet of several nodes comes back. A peer whose agent is
dead, or does not accept the key, has answered.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.core.address import listen_address
from dshealthd.linux.starvation import LoopLag
from dshealthd.plural import plural
from dshealthd.probe.members.hostlist import HostlistError, expand
from dshealthd.probe.members.identity import local_addresses, own_name
from dshealthd.probe.members.local_membership import hostname
from dshealthd.probe.members.membership import MembershipError, load
from dshealthd.probe.observation import Outcome
from dshealthd.probe.peers.client import PeerClient
from dshealthd.probe.peers.contract import PeerError
from dshealthd.probe.peers.credentials import CredentialError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dshealthd.config import Config

MOST = 8
"""Nodes that one node asks: a job of a thousand nodes makes no million of echoes."""
LEAST = 2
"""Silent nodes from which on the fault is taken to be this node's: one may itself be cut off."""
DEADLINE = 2.0
"""Seconds for all echoes of one look, which are sent at once."""
SILENT = frozenset((Outcome.UNREACHABLE, Outcome.HUNG))


class NotAsked(Exception):
    """The others cannot be asked; the message says why. Nothing is known of them."""


class Reach(NamedTuple):
    """What came of one look."""

    asked: int
    problems: dict[str, str]
    """What is wrong with each node that did not answer well."""
    silent: int
    """How many of them gave no sign of life."""

    @property
    def cut_off(self) -> bool:
        """Whether this node is what is wrong: none of several others gave a sign of life."""
        return self.asked >= LEAST and self.silent == self.asked

    def __str__(self) -> str:
        named = ", ".join(f"{name} {reason}" for name, reason in sorted(self.problems.items()))
        good = self.asked - len(self.problems)
        return f"{good} of {plural(self.asked, 'node')} of the job answered" + (
            f"; {named}" if named else ""
        )


def neighbours(me: str, nodes: Sequence[str], most: int = MOST) -> list[str]:
    """Return whom a node asks: those behind it in the ring of a job's nodes, so that all share."""
    ring = sorted(nodes)
    at = ring.index(me)
    return (ring[at + 1 :] + ring[:at])[:most]


def look(config: Config, expression: str) -> Reach:
    """Send an echo to other nodes of an allocation, in Slurm's notation. NotAsked.

    Nodes that are no members of the probes have no agent that could answer, and are left out.
    """
    peer = config.probe.peer
    if not peer.listen_address or not config.probe.members.sources:
        message = "slurm.prolog_probe needs probe.peer and probe.members"
        raise NotAsked(message)
    try:
        names = load(config.probe.members).names
        me = own_name(
            names, hostname(), local_addresses(config.path.host), config.probe.members.name
        )
        nodes = {*expand(expression), me} & set(names)
        _, port = listen_address(peer.listen_address)
        return asyncio.run(_ask(config, me, neighbours(me, sorted(nodes)), port))
    except (MembershipError, CredentialError, HostlistError, OSError) as error:
        message = f"the nodes of the job are not asked: {error}"
        raise NotAsked(message) from error


async def _ask(config: Config, me: str, others: Sequence[str], port: int) -> Reach:
    """Send all echoes at once."""
    client = PeerClient(config.probe.peer, me, lambda name: (name, port))
    problems: dict[str, str] = {}
    silent = 0

    async def one(name: str) -> None:
        nonlocal silent
        try:
            await client.call(name, "echo", {"clock": time.time(), "payload": b""}, DEADLINE)
        except PeerError as error:
            problems[name] = error.reason or str(error.outcome)
            silent += error.outcome in SILENT

    with LoopLag() as lag:
        try:
            await asyncio.gather(*map(one, others))
        finally:
            await client.close()
    if silent and lag.starved:
        message = f"this node is too busy to tell who is silent: no CPU for {lag.longest:.1f} s"
        raise NotAsked(message)
    return Reach(len(others), problems, silent)
