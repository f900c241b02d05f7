"""The view of the fleet: queries all members' summaries while people look, and keeps the answers.

It sends no queries while nobody looks, and at most one round in ten seconds however many do. In a
large fleet rounds are rarer: if somebody looks at every agent, each member is queried by all
others, and the rate at which it has to answer must not grow with the fleet.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dshealthd.core import documents
from dshealthd.core.documents import LeftOut
from dshealthd.findings.finding import State
from dshealthd.fleet.jobs import OUT_OF_DATE, merge_jobs, shown_jobs
from dshealthd.probe.peers.protocol import PeerError

if TYPE_CHECKING:
    from dshealthd.probe.members.membership import Membership
    from dshealthd.probe.service import ProbeService


log = logging.getLogger(__name__)

SCHEMA = 1
"""Version of `/api/v1/fleet`; see docs/status-api.md."""
EVERY = 10.0
"""Least seconds from one round of queries to the next, while somebody looks."""
CALLS_PER_SECOND = 20.0
"""Most queries per second that reach a member, on average, when all agents are looked at.

Answering one takes about a millisecond.
"""
CURRENT = 20.0
"""Seconds beyond the next round for which an answer is shown as the member's state: that round
takes its time too.
"""
DEADLINE = 4.0
"""Seconds for one member's answer."""
FIRST_PICTURE = DEADLINE + 0.5
"""Most seconds that a document waits for members that have not been asked lately, from when they
are asked on: without them it would show a fleet of which nothing is known. A member that is down
takes its deadline. The page waits longer for an answer.
"""
AT_ONCE = 64
"""Members queried at a time, each on its own connection."""
CALLS_TO_LARGE = 128.0
"""Most queries per second to a fleet of more than MAX_NODES: each takes a millisecond of this
agent, too.
"""
MAX_NODES = 1000
"""Most members listed one by one; of more, those that are well are only counted, leaf by leaf."""
DOCUMENT_KEPT = 1.0
"""Seconds for which the document is cached; rendering a thousand nodes takes some 10 ms."""
_WORST = (State.CRITICAL, "unreachable", State.UNKNOWN, State.WARNING)
"""States of members that are listed whatever the size of the fleet, from the worst on."""


@dataclass(frozen=True, slots=True)
class MemberAnswer:
    """The last answer of one member, or why there is none."""

    at: float
    """Unix time."""
    heard: float
    """The same by the monotonic clock: an answer must not become current because a clock is set."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Empty without an answer."""
    problem: str = ""
    """Why there is no answer."""

    @property
    def state(self) -> str:
        """The verdict of a member of the fleet: `unreachable` without an answer, `unknown` for a
        state that this release does not know.
        """
        if self.problem:
            return "unreachable"
        try:
            return str(State(self.summary["verdict"]))
        except (ValueError, ArithmeticError):
            return str(State.UNKNOWN)


class Fleet:
    """The members' latest summaries of themselves, as this agent has them."""

    def __init__(
        self,
        membership: Callable[[], Membership],
        own: Callable[[], tuple[str, Mapping[str, Any]]],
        suspects: Callable[[], list[dict[str, str]]],
        ask: Callable[[str, float], Awaitable[Mapping[str, Any]]],
        monotonic: Callable[[], float],
        wall: Callable[[], float],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`membership` raises LookupError while it is not known.

        `own` returns this node's name and summary, `suspects` this agent's suspects; `ask` returns
        a member's summary within some seconds, or raises PeerError or LookupError; `pause` waits
        for some seconds.
        """
        self._membership, self._own, self._suspects = membership, own, suspects
        self._ask = ask
        self._pause = pause
        self._monotonic, self._wall = monotonic, wall
        self._answers: dict[str, MemberAnswer] = {}
        self._asked = float("-inf")
        self._round: asyncio.Task[None] | None = None
        self._document: tuple[float, bytes] = (float("-inf"), b"")

    async def picture(self) -> bytes:
        """Return `/api/v1/fleet` once members that were not asked lately have had time to answer.

        Raises LookupError while the members are not known.
        """
        membership = self._begin()
        left = self._asked + FIRST_PICTURE - self._monotonic()
        if self._round is not None and left > 0.0 and not self._all_current(membership):
            await asyncio.wait({self._round}, timeout=left)
        return self.document()

    def document(self) -> bytes:
        """Return `/api/v1/fleet` as it is known now, and start a round of queries if one is due.

        Raises LookupError while the members are not known.
        """
        membership = self._begin()
        now = self._monotonic()
        made, body = self._document
        if now - made >= DOCUMENT_KEPT:
            left_out = LeftOut()
            body = documents.whole(self._view(membership, left_out), left_out).encode()
            self._document = now, body
        return body

    def _begin(self) -> Membership:
        """Start a round of queries if one is due; return the members of the fleet."""
        membership = self._membership()
        now = self._monotonic()
        if self._round is None and now - self._asked >= period(len(membership.names)):
            self._asked = now
            self._round = asyncio.create_task(self._query_all(membership.names), name="fleet")
            self._round.add_done_callback(self._ended)
        return membership

    def _all_current(self, membership: Membership) -> bool:
        """Return whether the answer of each member of the fleet counts as its state."""
        since = self._since(membership)
        me, _ = self._own()
        return all(
            name == me or ((answer := self._answers.get(name)) and answer.heard >= since)
            for name in membership.names
        )

    def _since(self, membership: Membership) -> float:
        return self._monotonic() - period(len(membership.names)) - CURRENT

    async def settled(self) -> None:
        """Wait for the round of queries to the fleet that is in progress, if any."""
        if self._round is not None:
            await asyncio.wait({self._round})

    async def close(self) -> None:
        """Cancel the round of queries to the fleet that is in progress, if any."""
        if self._round is not None:
            self._round.cancel()
            await asyncio.gather(self._round, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._round = None
        self._document = float("-inf"), b""  # made before the last answers
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error(
                "fleet: a round of queries failed because of a bug: %r", error, exc_info=error
            )

    async def _query_all(self, names: tuple[str, ...]) -> None:
        """Query the whole fleet once: unknown members first, then those that are not well, and
        those that did not answer last.

        A member that is down takes its whole deadline, and would keep the others waiting.
        """
        me, summary = self._own()
        for gone in self._answers.keys() - set(names):
            del self._answers[gone]
        if me in names:
            self._answers[me] = self._heard(summary=summary)
        left = sorted(set(names) - {me}, key=self._turn)
        waiting = iter(left)

        async def work() -> None:
            for name in waiting:
                self._answers[name] = await self._answer(name)
                if len(names) > MAX_NODES:
                    await self._pause(AT_ONCE / CALLS_TO_LARGE)

        await asyncio.gather(*(work() for _ in range(min(AT_ONCE, len(left)))))

    def _turn(self, name: str) -> tuple[bool, bool, bool, str]:
        """Return the sort key for the order in which the fleet's members are queried."""
        answer = self._answers.get(name)
        if answer is None:
            return False, False, False, name
        return bool(answer.problem), True, answer.state == State.OK, name

    async def _answer(self, name: str) -> MemberAnswer:
        try:
            summary = await self._ask(name, DEADLINE)
        except PeerError as error:
            words = dict.fromkeys((str(error.outcome), error.reason))  # the same one once
            return self._heard(problem=": ".join(words))
        except LookupError as error:
            return self._heard(problem=str(error))
        return self._heard(summary=summary)

    def _heard(self, **answer: Any) -> MemberAnswer:
        return MemberAnswer(self._wall(), self._monotonic(), **answer)

    def _view(self, membership: Membership, left_out: LeftOut) -> dict[str, Any]:
        me, own = self._own()
        known = {**self._answers, me: self._heard(summary=own)}
        since = self._since(membership)
        current: list[tuple[str, Mapping[str, Any]]] = []
        old: list[tuple[str, Mapping[str, Any]]] = []
        for name in membership.names:
            if (answer := known.get(name)) is not None and answer.summary:
                (current if answer.heard >= since else old).append((name, answer.summary))
        for name, summary in current:
            for told in summary.get("left_out", ()):
                part, _, reason = told.partition(": ")
                left_out.add_reason(f"{name}, {part}", reason)
        found = merge_jobs(current, old, left_out)
        shown = shown_jobs(found)
        states = {name: _state(known.get(name), since) for name in membership.names}
        return {
            "schema": SCHEMA,
            "node": me,
            "time": round(self._wall(), 3),
            "asking": self._round is not None,
            "suspects": self._suspects(),
            "members": len(states),
            "states": Counter(states.values()),
            "leaves": _leaves(states, membership.leaves),
            "nodes": list(
                left_out.each(
                    "node",
                    _listed(states),
                    str,
                    lambda name: _node(
                        name, membership.leaves.get(name, ""), known.get(name), states[name]
                    ),
                )
            ),
            "jobs": shown,
            "jobs_left_out": len(found) - len(shown),
        }


def _listed(states: Mapping[str, str]) -> Iterable[str]:
    """Return the members of the fleet that are listed: all, or the worst of many."""
    if len(states) <= MAX_NODES:
        return states
    troubled = [name for name, state in states.items() if state in _WORST]
    return sorted(troubled, key=lambda name: (_WORST.index(states[name]), name))[:MAX_NODES]


def _leaves(states: Mapping[str, str], leaves: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return how many members of each leaf of the fleet are in each state."""
    counts: dict[str, Counter[str]] = {}
    for name, state in states.items():
        counts.setdefault(leaves.get(name, ""), Counter())[state] += 1
    return [{"leaf": leaf, "states": count} for leaf, count in sorted(counts.items())]


def period(members: int) -> float:
    """Return the seconds from one round of queries to the next in a fleet of this size."""
    return max(EVERY, members / CALLS_PER_SECOND)


def fleet_of(service: ProbeService, summary: Callable[[], Mapping[str, Any]]) -> Fleet:
    """Return the fleet's view of the members that an agent's probes know."""
    return Fleet(
        lambda: service.membership,
        lambda: (service.me, summary()),
        service.suspects,
        service.query_summary,
        time.monotonic,
        time.time,
    )


def _state(answer: MemberAnswer | None, since: float) -> str:
    """Return the state of a member of the fleet, of whom only answers from `since` on count."""
    if answer is None:
        return "not asked yet"
    return answer.state if answer.heard >= since else OUT_OF_DATE


def _node(name: str, leaf: str, answer: MemberAnswer | None, state: str) -> dict[str, Any]:
    """Return one square of the fleet's page: a member in this state, and its answer if it
    counts.
    """
    if answer is None:
        return {"name": name, "leaf": leaf, "state": state}
    node: dict[str, Any] = {"name": name, "leaf": leaf, "state": state, "time": round(answer.at, 3)}
    if state == OUT_OF_DATE:
        return node | {"last": answer.state}
    if answer.problem:
        return node | {"problem": answer.problem}
    entry = answer.summary
    return node | {
        name: entry[name]
        for name in ("version", "problems", "unreadable", "watched", "hours", "findings")
        if entry.get(name)
    }
