"""An allocation's other nodes, asked right before a job of Slurm starts: echoes between agents.

Light rounds as those of `dshealthd.probe`, without a GPU, from this node to some others at once: an
empty echo, then one with data. A node blames nobody but itself: it is cut off where no packet of
several nodes comes back, and loses data where several nodes answer small messages and none a large
one. A peer whose agent is dead, hung, or does not accept the key has shown that packets pass.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.core.address import listen_address
from dshealthd.core.deadline import time_limit
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
from dshealthd.probe.rounds import light

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dshealthd.config import Config

MOST = 8
"""Nodes that one node asks: a job of a thousand nodes makes no million of echoes."""
LEAST = 2
"""Nodes from which on the fault is taken to be this node's: one may itself be cut off."""
DEADLINE = 2.0
"""Seconds for one echo; all nodes are asked at once."""
ROUND = 3.5
"""Seconds for all echoes with one node: two such looks, the pause between them and the question to
slurmctld add up to 10 s."""
LOST = "bulk_transfer"
"""What is wrong with a node that answers small messages before and after it misses a large one."""
CUT_OFF = "node-cut-off"
"""What a node is drained for that reaches no other node of its job."""
BULK_FAILED = "bulk-transfer-failed"
"""What a node is drained for whose large messages arrive at no other: a wrong MTU, as a rule."""
_TIMED_OUT = frozenset((Outcome.UNREACHABLE, Outcome.HUNG))


class NotAsked(Exception):
    """The others cannot be asked; the message says why. Nothing is known of them."""


class Reach(NamedTuple):
    """What came of one look."""

    asked: int
    problems: dict[str, str]
    """What is wrong with each node that did not answer well."""
    silent: int
    """Of how many of them no packet came back."""

    @property
    def fault(self) -> str:
        """What of an allocation this node is drained for; empty if the fault may be elsewhere."""
        if self.asked >= LEAST and self.silent == self.asked:
            return CUT_OFF
        lost = sum(reason == LOST for reason in self.problems.values())
        return BULK_FAILED if lost >= LEAST and len(self.problems) == self.asked else ""

    def __str__(self) -> str:
        named = ", ".join(f"{name} {reason}" for name, reason in sorted(self.problems.items()))
        good = self.asked - len(self.problems)
        return f"{good} of {plural(self.asked, 'node')} of the job answered" + (
            f"; {named}" if named else ""
        )


def neighbours(me: str, nodes: Sequence[str], most: int = MOST) -> list[str]:
    """Return whom a node of an allocation asks: those behind it in its ring, so that all share."""
    ring = sorted(nodes)
    at = ring.index(me)
    return (ring[at + 1 :] + ring[:at])[:most]


def look(config: Config, expression: str) -> Reach:
    """Have light rounds with other nodes of an allocation, in Slurm's notation. NotAsked.

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
    """Have all light rounds with the allocation's nodes at once."""
    client = PeerClient(config.probe.peer, me, lambda name: (name, port))
    with LoopLag() as lag:
        try:
            found = await asyncio.gather(*(_round(client, name) for name in others))
        finally:
            await client.close()
    problems = {name: problem for name, (problem, _) in zip(others, found, strict=True) if problem}
    if problems and lag.starved:
        message = f"this node is too busy to tell who is silent: no CPU for {lag.longest:.1f} s"
        raise NotAsked(message)
    return Reach(len(others), problems, sum(silent for _, silent in found))


async def _round(client: PeerClient, name: str) -> tuple[str, bool]:
    """Return what is wrong with an allocated node (empty: nothing), and whether no packet came back
    from it.
    """
    answered = False
    try:
        async with time_limit(ROUND):
            await light.echo(client, name, b"", time.time(), DEADLINE)
            answered = True
            try:
                await light.echo(client, name, light.PAYLOAD, time.time(), DEADLINE)
            except PeerError as error:
                if error.outcome not in _TIMED_OUT:
                    raise
                # Raises in its turn where the agent has ended or hung meanwhile.
                await light.echo(client, name, b"", time.time(), DEADLINE)
                return LOST, False
    except PeerError as error:
        # A hung agent's kernel acknowledges, and a name server's word is none of the node's.
        lost = error.outcome is Outcome.UNREACHABLE and error.reason != "name_unknown"
        return error.reason or str(error.outcome), lost and not answered
    except TimeoutError:
        return "slow", False
    return "", False
