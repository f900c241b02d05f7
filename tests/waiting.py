"""Waits for conditions, for as long as a machine that does much else may take."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENT = 240.0
"""Seconds; a test is ended after 300."""


def until(
    condition: Callable[[], T | None],
    said: Callable[[], object] = str,
    seconds: float = PATIENT,
    errors: tuple[type[Exception], ...] = (),
) -> T:
    """Return what a condition finds, once it is true; with one of the `errors` it is not. If it
    never is, AssertionError with what is `said` then.
    """
    end = time.monotonic() + seconds
    pause = 0.01  # grows: what is asked may take the CPU that it waits for
    while True:
        with contextlib.suppress(*errors):
            if found := condition():
                return found
        assert time.monotonic() < end, f"not within {seconds:g} s: {said()}"
        time.sleep(pause)
        pause = min(1.5 * pause, 0.3)


async def eventually(condition: Callable[[], object], seconds: float = PATIENT) -> None:
    """Wait until a condition holds, while the loop goes on."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)
