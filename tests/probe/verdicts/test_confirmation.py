"""Extra rounds are run one after the other, and whoever asks learns which are not."""

from __future__ import annotations

import asyncio

from dshealthd.probe.observation import Kind
from dshealthd.probe.verdicts.confirmation import Confirmations
from dshealthd.probe.verdicts.detector import Confirmation

WANTED = Confirmation(("a", "b"), Kind.PAIR)
OTHER = Confirmation(("a", "c"), Kind.PAIR)


def test_what_a_round_asks_for_is_run_after_it() -> None:
    """The same members once more, asked for by the round in hand, are another round and not a
    repetition of what is queued.
    """
    ran: list[Confirmation] = []

    async def scene() -> None:
        async def one(confirmation: Confirmation) -> bool:
            ran.append(confirmation)
            if len(ran) < 3:
                assert confirmations.add([WANTED]) == ()
            return True

        confirmations = Confirmations(6, one, lambda: 0.0)
        confirmations.add([WANTED, WANTED])
        working = asyncio.create_task(confirmations.work())
        async with asyncio.timeout(60):
            while len(ran) < 3:
                await asyncio.sleep(0)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)

    asyncio.run(scene())
    assert ran == [WANTED] * 3


def test_what_is_dropped_is_returned() -> None:
    """Beyond the number a minute nothing is queued, and the judge can be told so."""

    async def never(_confirmation: Confirmation) -> bool:
        raise AssertionError

    confirmations = Confirmations(1, never, lambda: 0.0)
    assert confirmations.add([WANTED, OTHER]) == (OTHER,)
