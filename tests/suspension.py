"""A machine that is suspended: its clock jumps, and what has arrived meanwhile is read late."""

from __future__ import annotations

import asyncio
import time

import pytest

from dshealthd.core import timing


class Suspension:
    """Makes the running loop's clock jump, as a suspended machine's does, and reading take long.

    Deadlines are as long as they are in earnest, so that no machine is too slow for what comes
    before the jump.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._jump = 0.0
        monkeypatch.setattr(timing, "MOMENT", 60.0)
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda: time.monotonic() + self._jump)

    def resume(self, seconds: float) -> None:
        """Go on after so many seconds, without a turn of the loop in between."""
        self._jump += seconds


async def turns() -> None:
    """Let what can run without waiting come to where it waits."""
    for _ in range(20):
        await asyncio.sleep(0)
