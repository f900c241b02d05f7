"""Members' requests to this node: take part in a round, lead one, or report on itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dshealthd.probe.members.absences import MAINTENANCE
from dshealthd.probe.observation import ON_DEMAND, RoundKind
from dshealthd.probe.peers.protocol import Refusal, Rejection
from dshealthd.probe.rounds.active_round import Decline

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from dshealthd.probe.node import ProbeState
    from dshealthd.probe.rounds.active_round import RoundReport
    from dshealthd.probe.rounds.round import Handler, Rounds


class PeerRequests:
    """The handlers of other members' calls, by method."""

    def __init__(
        self, state: ProbeState, rounds: Rounds, lead: Callable[..., Awaitable[RoundReport | None]]
    ) -> None:
        """`lead` leads a round of these members, kind and steps."""
        self._me = state.local_membership.me
        self._state, self._rounds, self._lead = state, rounds.handlers(), lead

    def handlers(self) -> Mapping[str, Handler]:
        """Return the handler of each method that members may call."""
        return {
            **self._rounds,
            "invite": self._invited,
            "absent": self._state.absences.answer,
            "summary": self._summarize,
            "lead": self._lead_on_demand,
        }

    async def _invited(self, sender: str, body: dict[str, Any]) -> dict[str, Any]:
        """Take part in another node's round; in maintenance, only in one on demand."""
        if body["plan"].epoch != ON_DEMAND:
            self._state.absences.record(
                sender, 0.0
            )  # a leader of scheduled rounds is not in maintenance
            if self._state.absences.own_end():
                raise Refusal(MAINTENANCE)
        return await self._rounds["invite"](sender, body)

    async def _lead_on_demand(self, _sender: str, body: dict[str, Any]) -> dict[str, Any]:
        members, kind = body["members"], body["kind"]
        if members[0] != self._me or members[1] == self._me or kind is RoundKind.LOCAL:
            raise Refusal(Rejection.MALFORMED)
        if not set(members) <= set(self._state.local_membership.membership.names):
            raise Refusal(Decline.MEMBERS)
        report = await self._lead(members, kind, body["steps"])
        if report is None:
            raise Refusal(Decline.TESTING)
        return {"observation": report.observation}

    async def _summarize(self, _sender: str, _body: dict[str, Any]) -> dict[str, Any]:
        return self._state.summary()
