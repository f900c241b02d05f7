"""The drain budget: how many nodes all agents together may drain, agreed on through slurmctld.

A driver upgrade or a bug in dshealthd makes many nodes look bad at once, and every node decides for
itself. So the budget counts what the controller knows: the nodes that carry a reason of ours from
the last hour, and from the last day, because a fault that spends each hour's budget again would
drain half of the cluster by the next morning. Nodes that want to drain at the same moment take
tickets, as in Lamport's bakery (https://lamport.azurewebsites.net/pubs/bakery.pdf), in notes after
their comments: a node that takes one later sees the earlier ones, as a ticket or as a drain.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from dshealthd.findings.past import DAY, HOUR
from dshealthd.slurm.controller import Controller, ControllerError, SlurmNode

_LEAST_A_DAY = 2
"""Nodes that may be drained in a day in the smallest cluster: with one, the first bad GPU would use
up the day's budget."""
CLAIM_LIFE = 900.0
"""Seconds for which a ticket counts: twice the difference at which munge refuses clocks (300 s
each), and the run that took it. Only a node that died with a ticket leaves one behind."""
CHOOSING = 0
"""The ticket of a node that is about to take one; it comes before all others."""
POLL = 0.2
"""Seconds between two looks at what another check holds."""
_PATIENCE = 2.0
"""Seconds to wait for others to take their tickets; after that, leave it to the next check."""
_CLAIM = re.compile(r"claim ticket=(\d{1,9}) time=(\d{1,12})")


class DrainClaim(NamedTuple):
    """A node's turn to drain; the earliest sorts first."""

    ticket: int
    name: str


class Allowance(NamedTuple):
    """How many more nodes may be drained."""

    room: int
    """Number of nodes; 0 or less once the budget is spent."""
    budget: str
    """The tighter budget, as text."""


def size(nodes: int, ratio: float) -> int:
    """Return the drain budget of so many nodes: a share of them, at least one."""
    return max(1, int(nodes * ratio))


def spent_budget(nodes: Iterable[SlurmNode], wall: float, period: float = HOUR) -> int:
    """Return how much of the budget is spent: nodes that we drained in the last hour, or in another
    period. Times in the future count too, because clocks differ.
    """
    return sum(node.ours and node.state.drained and wall - node.since < period for node in nodes)


def allowance(
    nodes: Iterable[SlurmNode], ratio: float, daily_ratio: float, wall: float
) -> Allowance:
    """Return how many more nodes the budget allows to drain, not counting tickets: a share of those
    with GPUs, if Slurm knows of any. Beside thousands of others it would be all of them.
    """
    nodes = list(nodes)
    share_of = sum(node.gpus for node in nodes) or len(nodes)
    hourly = size(share_of, ratio)
    daily = max(_LEAST_A_DAY, hourly, size(share_of, daily_ratio))
    return min(
        Allowance(hourly - spent_budget(nodes, wall), f"{hourly} an hour"),
        Allowance(daily - spent_budget(nodes, wall, DAY), f"{daily} a day"),
        key=lambda entry: entry.room,
    )


def claims(nodes: Iterable[SlurmNode], wall: float) -> list[DrainClaim]:
    """Return the valid tickets for the budget, including those of `CHOOSING`."""
    found = []
    for node in nodes:
        match = _CLAIM.fullmatch(node.note)
        if match and abs(wall - int(match[2])) < CLAIM_LIFE:
            found.append(DrainClaim(int(match[1]), node.name))
    return found


def drain(
    controller: Controller,
    name: str,
    reason: str,
    ratio: float,
    daily_ratio: float,
    *,
    wall: Callable[[], float] = time.time,
    sleep: Callable[[float], object] = time.sleep,
) -> str:
    """Drain the node within the budget; return why it was not drained, or an empty text. If the
    budget is spent, leave a note that says so. Respect a reason or a state that somebody sets
    meanwhile. Raises ControllerError.
    """
    nodes = controller.nodes()
    me = nodes[name]
    allowed = allowance(nodes.values(), ratio, daily_ratio, wall())
    if allowed.room <= 0:
        return _over(controller, me, reason, allowed)
    _claim(controller, me, CHOOSING, wall())
    try:
        others = claims(controller.nodes().values(), wall())
        ticket = 1 + max((claim.ticket for claim in others), default=CHOOSING)
        _claim(controller, me, ticket, wall())
        nodes = _settled(controller, wall, sleep)
        me = nodes[name]
        ahead = [claim for claim in claims(nodes.values(), wall()) if claim < (ticket, name)]
        allowed = allowance(nodes.values(), ratio, daily_ratio, wall())
    except ControllerError:
        controller.set_note(me, "")
        raise
    if me.reason or not me.state.working:
        controller.set_note(me, "")
        return f"somebody else changed the node meanwhile: {me.reason or me.state.base}"
    if allowed.room <= len(ahead):
        return _over(controller, me, reason, allowed)
    controller.drain(me, reason)
    return ""


def _claim(controller: Controller, me: SlurmNode, ticket: int, wall: float) -> None:
    controller.set_note(me, f"claim ticket={ticket} time={wall:.0f}")


def _settled(
    controller: Controller, wall: Callable[[], float], sleep: Callable[[float], object]
) -> dict[str, SlurmNode]:
    """Return the nodes once none is about to take a ticket. Raises ControllerError if that takes
    too long. The budget holds without this too, but nodes that start together would block each
    other.
    """
    waited = 0.0
    while True:
        nodes = controller.nodes()
        if all(claim.ticket != CHOOSING for claim in claims(nodes.values(), wall())):
            return nodes
        if waited >= _PATIENCE:
            raise ControllerError("other nodes are still taking their tickets for the drain budget")
        sleep(POLL)
        waited += POLL


def _over(controller: Controller, me: SlurmNode, reason: str, allowed: Allowance) -> str:
    """Leave a note on the node that the budget is spent, and return what it says."""
    note = f"not drained, budget of {allowed.budget} is spent: {reason.partition(': ')[2]}"
    if me.note != note:
        controller.set_note(me, note)
    return note
