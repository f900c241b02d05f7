"""How many nodes may be drained by all agents together, agreed upon through slurmctld alone.

A driver upgrade or a fault of dshealthd makes many nodes look bad at once, and every node decides
for itself. So what counts is what the controller knows: the nodes that carry a reason of ours from
the last hour. Nodes that want to drain at the same moment take tickets, as in Lamport's bakery
(https://lamport.azurewebsites.net/pubs/bakery.pdf), in notes behind their comments: whoever takes
one later sees the earlier ones, as a ticket or as a drain.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.slurm.controller import ControllerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dshealthd.slurm.controller import Node, Slurm

HOUR = 3600.0
CLAIM_LIFE = 900.0
"""Seconds for which a ticket counts: twice what two clocks may differ by before munge refuses them
(300 s each), and the run that took it. Only a node that died with a ticket leaves one."""
CHOOSING = 0
"""The ticket of a node that is about to take one; it counts as before all others."""
_POLL = 0.2
_PATIENCE = 2.0
"""Seconds for others to take their tickets; longer, and it is left to the next check."""
_CLAIM = re.compile(r"claim ticket=(\d{1,9}) time=(\d{1,12})")


class Claim(NamedTuple):
    """A node's turn to drain; sorted by who was first."""

    ticket: int
    name: str


def size(nodes: int, ratio: float) -> int:
    """Return how many of so many nodes may be drained in an hour."""
    return max(1, int(nodes * ratio))


def spent(nodes: Iterable[Node], wall: float) -> int:
    """Return how many nodes were drained by us in the last hour; a time to come counts too."""
    return sum(node.ours and node.state.drained and wall - node.since < HOUR for node in nodes)


def claims(nodes: Iterable[Node], wall: float) -> list[Claim]:
    """Return the tickets that count, those of `CHOOSING` among them."""
    found = []
    for node in nodes:
        match = _CLAIM.fullmatch(node.note)
        if match and abs(wall - int(match[2])) < CLAIM_LIFE:
            found.append(Claim(int(match[1]), node.name))
    return sorted(found)


def drain(
    controller: Slurm,
    name: str,
    reason: str,
    ratio: float,
    *,
    wall: Callable[[], float] = time.time,
    sleep: Callable[[float], object] = time.sleep,
) -> str:
    """Drain the node within the budget; return why not, or an empty text. ControllerError.

    Without room in the budget a note says so. A reason or a state that appears meanwhile stays.
    """
    nodes = controller.nodes()
    me = nodes[name]
    if (room := _room(nodes.values(), ratio, wall())) <= 0:
        return _over(controller, me, reason, nodes.values(), ratio)
    _claim(controller, me, CHOOSING, wall())
    try:
        others = claims(controller.nodes().values(), wall())
        ticket = 1 + max((claim.ticket for claim in others), default=CHOOSING)
        _claim(controller, me, ticket, wall())
        nodes = _settled(controller, wall, sleep)
        me = nodes[name]
        ahead = [claim for claim in claims(nodes.values(), wall()) if claim < (ticket, name)]
        room = _room(nodes.values(), ratio, wall()) - len(ahead)
    except ControllerError:
        controller.note(me, "")
        raise
    if me.reason or not me.state.working:
        controller.note(me, "")
        return f"somebody else has changed the node meanwhile: {me.reason or me.state.base}"
    if room <= 0:
        return _over(controller, me, reason, nodes.values(), ratio)
    controller.drain(me, reason)
    return ""


def _room(nodes: Iterable[Node], ratio: float, wall: float) -> int:
    """Return how many more may be drained, tickets apart."""
    nodes = list(nodes)
    return size(len(nodes), ratio) - spent(nodes, wall)


def _claim(controller: Slurm, me: Node, ticket: int, wall: float) -> None:
    controller.note(me, f"claim ticket={ticket} time={wall:.0f}")


def _settled(
    controller: Slurm, wall: Callable[[], float], sleep: Callable[[float], object]
) -> dict[str, Node]:
    """Return the nodes once nobody is about to take a ticket; ControllerError if that lasts.

    Without this the budget holds as well, but nodes that begin together refuse each other.
    """
    waited = 0.0
    while True:
        nodes = controller.nodes()
        if all(claim.ticket != CHOOSING for claim in claims(nodes.values(), wall())):
            return nodes
        if waited >= _PATIENCE:
            message = "other nodes have not taken their turn in the drain budget"
            raise ControllerError(message)
        sleep(_POLL)
        waited += _POLL


def _over(controller: Slurm, me: Node, reason: str, nodes: Iterable[Node], ratio: float) -> str:
    """Leave a note on the node, and return what it says."""
    total = size(len(list(nodes)), ratio)
    note = f"not drained, budget of {total} an hour is spent: {reason.partition(': ')[2]}"
    if me.note != note:
        controller.note(me, note)
    return note
