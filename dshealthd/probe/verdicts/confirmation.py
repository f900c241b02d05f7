"""Confirmations: the extra rounds that the detector asks for, queued and run.

They run immediately, one after another, within a limit per minute.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

from dshealthd.core.collector import Sample, counter

if TYPE_CHECKING:
    from dshealthd.probe.verdicts.planner import Confirmation

CONFIRMATIONS = counter(
    "dshealthd_probe_confirmations_total",
    "Extra rounds requested to confirm or clear a suspicion; result dropped: too many in a minute.",
    "result",
)

MINUTE = 60.0
"""Seconds within which at most `per_minute` rounds are accepted."""


class Confirmations:
    """A queue of extra rounds, and how many more may be added in a minute."""

    def __init__(
        self,
        per_minute: int,
        run: Callable[[Confirmation], Coroutine[Any, Any, bool]],
        monotonic: Callable[[], float],
    ) -> None:
        """Queue confirmations for `run`, which runs a round and returns whether it was possible."""
        self._per_minute = per_minute
        self._run = run
        self._monotonic = monotonic
        self._pending: asyncio.Queue[Confirmation] = asyncio.Queue()
        self._begun: deque[float] = deque()
        self._results: Counter[str] = Counter()

    def add(self, confirmation: Confirmation) -> bool:
        """Queue a confirmation; return False if it is dropped."""
        now = self._monotonic()
        while self._begun and now - self._begun[0] > MINUTE:
            self._begun.popleft()
        if len(self._begun) >= self._per_minute:
            self._results["dropped"] += 1
            return False
        self._begun.append(now)
        self._pending.put_nowait(confirmation)
        return True

    async def work(self) -> None:
        """Run the queued confirmations one after another, until cancelled."""
        while True:
            confirmation = await self._pending.get()
            self._results["run" if await self._run(confirmation) else "not_possible"] += 1

    def samples(self) -> Iterator[Sample]:
        """Yield the number of confirmations run, dropped, or not possible."""
        for result, count in self._results.items():
            yield CONFIRMATIONS(float(count), result)
