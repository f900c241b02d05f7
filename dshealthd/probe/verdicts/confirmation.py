"""Confirmations: the extra rounds that a judge asks for, queued and run.

Run one after the other, at once, and never more than so many in a minute.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import TYPE_CHECKING

from dshealthd.core.collector import counter

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator
    from typing import Any

    from dshealthd.core.collector import Sample
    from dshealthd.probe.verdicts.detector import Confirmation

CONFIRMATIONS = counter(
    "dshealthd_probe_confirmations_total",
    "Extra rounds that a suspicion asked for; dropped: too many in a minute.",
    "result",
)
METRICS = (CONFIRMATIONS,)

MAX_PENDING = 8
"""Rounds that wait; each takes some 1.5 s, so what comes later would be of the next slot."""
MINUTE = 60.0
"""Seconds in which `per_minute` rounds may begin."""


class Confirmations:
    """A queue of extra rounds, each member list at most once in it."""

    def __init__(
        self,
        per_minute: int,
        run: Callable[[Confirmation], Coroutine[Any, Any, bool]],
        monotonic: Callable[[], float],
    ) -> None:
        """`run` runs one and says whether it could."""
        self._per_minute = per_minute
        self._run = run
        self._monotonic = monotonic
        self._pending: deque[Confirmation] = deque()
        self._begun: deque[float] = deque()
        self._added = asyncio.Event()
        self._results: Counter[str] = Counter()

    def add(self, confirmations: Iterable[Confirmation]) -> tuple[Confirmation, ...]:
        """Queue the confirmations that are asked for; return what is not run after all."""
        dropped = []
        for confirmation in confirmations:
            if confirmation in self._pending:
                continue
            if not self._allowed() or len(self._pending) >= MAX_PENDING:
                self._results["dropped"] += 1
                dropped.append(confirmation)
                continue
            self._begun.append(self._monotonic())
            self._pending.append(confirmation)
            self._added.set()
        return tuple(dropped)

    async def work(self) -> None:
        """Run the confirmations that are queued, one after the other, until cancelled."""
        while True:
            await self._added.wait()
            self._added.clear()
            while self._pending:
                # It may be asked for again by what it comes to.
                confirmation = self._pending.popleft()
                self._results["run" if await self._run(confirmation) else "not_possible"] += 1

    def samples(self) -> Iterator[Sample]:
        """Yield how many confirmations were run, dropped, or not possible."""
        for result, count in self._results.items():
            yield CONFIRMATIONS(float(count), result)

    def _allowed(self) -> bool:
        now = self._monotonic()
        while self._begun and now - self._begun[0] > MINUTE:
            self._begun.popleft()
        return len(self._begun) < self._per_minute
