"""The view of a thousand members, over a thousand real peer servers on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def look() -> dict[str, float]:
    """Return what one look at a thousand nodes took."""
    command = [sys.executable, "-m", "bench.bench_fleet", "--nodes", "1000"]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=250
    )
    took: dict[str, float] = json.loads(ended.stdout)
    return took


def test_a_thousand_nodes_are_cheap() -> None:
    """All of them answer, for a few times the CPU that asyncio's streams take to connect as often
    and exchange a frame, and ten MiB of memory.

    The best of up to three runs, as other work on the machine may meet one of the two alone.
    Seconds are the benchmark's: they are the machine's as much as the agent's.
    """
    for _ in range(3):
        took = look()
        assert took["answered"] == 1000
        assert took["memory grows MiB"] <= 10
        assert took["document KiB"] <= 512
        if took["of plain asyncio"] <= 5.0:
            return
    pytest.fail(f"{took['of plain asyncio']:.2f} times plain asyncio's CPU")
