"""Extra rounds run one after another, and the detector learns which of them are dropped."""

from __future__ import annotations

import asyncio

from dshealthd.probe.observation import RoundKind
from dshealthd.probe.verdicts.confirmation import Confirmations
from dshealthd.probe.verdicts.planner import Confirmation

WANTED = Confirmation(("a", "b"), RoundKind.PAIR)


def test_what_a_round_asks_for_is_run_after_it() -> None:
    """A running round may ask for the same members again: that is no duplicate."""
    ran: list[Confirmation] = []

    async def scene() -> None:
        async def one(confirmation: Confirmation) -> bool:
            ran.append(confirmation)
            if len(ran) < 3:
                assert confirmations.add(WANTED)
            return True

        confirmations = Confirmations(6, one, lambda: 0.0)
        confirmations.add(WANTED)
        working = asyncio.create_task(confirmations.work())
        async with asyncio.timeout(60):
            while len(ran) < 3:
                await asyncio.sleep(0)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)

    asyncio.run(scene())
    assert ran == [WANTED] * 3


def test_what_is_dropped_is_told() -> None:
    """Rounds over the limit per minute are dropped, and the detector is notified; a minute later
    they are not.
    """

    async def never(_confirmation: Confirmation) -> bool:
        raise AssertionError

    now = [0.0]
    confirmations = Confirmations(1, never, lambda: now[0])
    added = []
    for now[0] in (0.0, 60.0, 60.1):
        added.append(confirmations.add(WANTED))
    assert added == [True, False, True]
