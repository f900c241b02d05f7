"""Echoes with an allocation's other nodes right before a Slurm job starts.

Light rounds like those of `dshealthd.probe`, without GPUs, from this node to several others at
once: an empty echo, then one with data. A node blames only itself: it is cut off if no packet comes
back from any of several nodes, and it loses data if several nodes answer small messages but none a
large one. A peer whose agent is dead, hung, or rejects the key has shown that packets pass.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.core.address import listen_address
from dshealthd.core.text import plural
from dshealthd.core.timing import time_limit
from dshealthd.linux.starvation import LoopLag
from dshealthd.probe.members.hostlist import HostlistError, expand, quote
from dshealthd.probe.members.local_membership import hostname, local_addresses, own_name
from dshealthd.probe.members.membership import MembershipError, load
from dshealthd.probe.observation import Outcome
from dshealthd.probe.options import ProbeOptions
from dshealthd.probe.peers.client import PeerClient
from dshealthd.probe.peers.credentials import CredentialError
from dshealthd.probe.peers.protocol import PeerError
from dshealthd.probe.rounds import light

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dshealthd.config.config import Config

MOST = 8
"""Most nodes that one node contacts, so that a job of a thousand nodes does not send a million
echoes."""
LEAST = 2
"""Fewest silent nodes for which this node is to blame: a single one may itself be cut off."""
DEADLINE = 2.0
"""Seconds for one echo; all nodes are contacted at once."""
ROUND = 3.5
"""Seconds for all echoes with one node: two such rounds, the pause between them and the query to
slurmctld add up to 10 s."""
LOST = "bulk_transfer"
"""The problem of a node that answers small messages before and after it misses a large one."""
CUT_OFF = "node-cut-off"
"""Drain reason of a node that reaches no other node of its job."""
BULK_FAILED = "bulk-transfer-failed"
"""Drain reason of a node whose large messages reach no other node: usually a wrong MTU."""
_TIMED_OUT = frozenset((Outcome.UNREACHABLE, Outcome.HUNG))


class NotAsked(Exception):
    """The other nodes cannot be contacted, and nothing is known of them; the message says why."""


class Reach(NamedTuple):
    """The result of one round of echoes."""

    asked: int
    problems: dict[str, str]
    """The problem of each node that did not answer properly."""
    silent: int
    """Number of nodes from which no packet came back."""

    @property
    def fault(self) -> str:
        """The reason to drain this node of an allocation; empty if the fault may be elsewhere."""
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


def neighbors(me: str, nodes: Sequence[str], most: int = MOST) -> list[str]:
    """Return the nodes that one of an allocation contacts: the next ones in a ring."""
    ring = sorted(nodes)
    at = ring.index(me)
    return (ring[at + 1 :] + ring[:at])[:most]


def look(config: Config, node: str, expression: str) -> Reach:
    """Run light rounds with other nodes of an allocation, given in Slurm's notation. `node` is
    Slurm's name of this node; an allocation without it is not one of its jobs. Nodes that are not
    members of the probes have no agent to answer, and are left out. Raises NotAsked.
    """
    options = config.section(ProbeOptions)
    if not options.peer.listen_address or not options.members.sources:
        message = "slurm.prolog_probe needs probe.peer and probe.members"
        raise NotAsked(message)
    try:
        allocated = expand(expression)
        if node not in allocated:
            message = f"{quote(node)} is not among the nodes of the job, {quote(expression)}"
            raise NotAsked(message)
        names = load(options.members).names
        me = own_name(
            names,
            hostname(),
            local_addresses(config.path.host),
            options.members.name,
        )
        nodes = {*allocated, me} & set(names)
        _, port = listen_address(options.peer.listen_address)
        return asyncio.run(_ask(config, me, neighbors(me, sorted(nodes)), port))
    except (MembershipError, CredentialError, HostlistError, OSError) as error:
        message = f"cannot contact the nodes of the job: {error}"
        raise NotAsked(message) from error


async def _ask(config: Config, me: str, others: Sequence[str], port: int) -> Reach:
    client = PeerClient(config.section(ProbeOptions).peer, me, lambda name: (name, port))
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
    """Return the problem of a node (empty: none), and whether no packet came back from it."""
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
                # Raises too if the agent has ended or hung meanwhile.
                await light.echo(client, name, b"", time.time(), DEADLINE)
                return LOST, False
    except PeerError as error:
        # A hung agent's kernel still acknowledges, and a name server's answer is not the node's.
        lost = error.outcome is Outcome.UNREACHABLE and error.reason != "name_unknown"
        return error.reason or str(error.outcome), lost and not answered
    except TimeoutError:
        return "slow", False
    return "", False
