"""A stopwatch counts what is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.stopwatch import Stopwatch


def spin(seconds: float) -> None:
    """Use this much CPU."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.parametrize("pass_time", [time.sleep, spin])
def test_own_time_counts(pass_time: Callable[[float], None]) -> None:
    """Time for which a thread sleeps, or computes, is its own, unless the host takes a CPU away."""

    def own() -> float:
        watch = Stopwatch()
        pass_time(0.2)
        return watch.seconds()

    assert any(own() > 0.15 for _ in range(50))
