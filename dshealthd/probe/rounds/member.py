"""A member of a round that another node leads: runs its workers, hands in what they gave, and waits for the conclusion."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dshealthd.probe.observation import Kind, Outcome, Stage
from dshealthd.probe.peers.contract import PeerError
from dshealthd.probe.rounds.conclusion import SILENT, Findings, Share, combine, scores_of, timings_of
from dshealthd.probe.rounds.remote_store import RemoteStore

if TYPE_CHECKING:
    from dshealthd.probe.rounds.part import Means, Part

HANDING_IN = 2.0
"""Seconds for the root to take a share."""
ROUND = 60.0
"""Seconds after which a member takes the root for silent; each of its stages has a shorter deadline."""
LIGHT_ROUND = 20.0
"""The same in a light round."""
REPEAT = 3.0
"""Seconds after which a member that waits for the conclusion sends its share again."""


class Member:
    """Takes part in rounds."""

    def __init__(self, means: Means) -> None:
        """Take part with what this node has."""
        self._means = means

    async def take_part(self, part: Part) -> Findings:
        """Run this node's workers for another's round, tell it what they gave, and return what it comes to."""
        me, plan = self._means.node.name, part.plan
        store = RemoteStore(self._means.peers, plan.root, plan.round, self._means.monotonic)
        working = asyncio.create_task(self._means.work(part, store), name=f"workers of round {plan.round}")
        try:
            both: set[asyncio.Future[Any]] = {working, part.told}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if part.told.done():  # it is over before it has begun: another member declined
                return self._told(part)
            part.shares[me] = Share(working.result(), self._means.node.scores())
            return await self._hand_in(part)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def _hand_in(self, part: Part) -> Findings:
        """Send this node's share and wait for the conclusion."""
        me, root = self._means.node.name, part.plan.root
        share = {"round": part.plan.round, **part.shares[me].message()}
        answer: dict[str, Any] | PeerError = {}
        end = self._means.monotonic() + ROUND
        while not part.told.done() and not isinstance(answer, PeerError):
            # Again and again, as the root may be gone by now, or may have been started anew.
            answer = await self._means.ask(root, "result", share, HANDING_IN)
            if not isinstance(answer, PeerError):
                await asyncio.wait({part.told}, timeout=REPEAT)
                if self._means.monotonic() > end:
                    answer = PeerError(Outcome.HUNG, SILENT)
        if part.told.done():
            return self._told(part)
        assert isinstance(answer, PeerError)  # noqa: S101 - else it was told
        outcome = Outcome.HUNG if answer.outcome is Outcome.DECLINED else answer.outcome
        return combine(part.plan, part.shares, {root: (outcome, answer.reason)})

    async def await_light(self, part: Part) -> Findings:
        """Wait for the conclusion of a light round, whose echoes are answered as all echoes are, and return it."""
        part.plan = part.plan.light()
        try:
            async with asyncio.timeout(LIGHT_ROUND):
                await asyncio.shield(part.told)
        except TimeoutError:
            return Findings(Outcome.HUNG, Stage.SIZES, (), (part.plan.root,), SILENT)
        return self._told(part)

    def _told(self, part: Part) -> Findings:
        """Return what the root says that the round comes to."""
        body = part.told.result()
        if body["kind"] is Kind.LIGHT:
            part.plan = part.plan.light()
        part.scores = {"": scores_of(body, *part.plan.members)}
        late = tuple(name for name in body["late"] if name in part.plan.members)
        return Findings(body["outcome"], body["stage"], timings_of(body["timings"]), late, body["reason"])
