"""What a round's collectives send."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.probe.options import PolicyOptions, ProbeOptions
from dshealthd.probe.rounds.plan import SMALLEST_LARGE, sent, steps_at, within
from dshealthd.probe.workers.job import BANDWIDTH, LATENCY

MEASURED = 21.8e6
"""Bytes per second that an idle node without GPUs sent when its large collective was of 64 MiB."""


def per_minute(limit: float, period: float, large_every: int) -> float:
    """Return the bytes that a node sends per minute, in the long run."""
    planned = within(limit, period, large_every)
    epochs = 2 * max(1, large_every)
    steps = [step for epoch in range(epochs) for step in steps_at(epoch, large_every, *planned)]
    return sum(sent(*step) for step in steps) / (epochs * period / 60.0)


@given(
    limit=st.integers(0, 10**10),
    period=st.sampled_from([1.0, 10.0, 60.0]),
    large_every=st.integers(0, 20),
)
def test_no_node_sends_more_than_allowed(limit: int, period: float, large_every: int) -> None:
    """Whatever is configured, the scheduled collectives stay within the bytes per minute."""
    assert per_minute(limit, period, large_every) <= limit


def test_defaults() -> None:
    """By default a node sends less than a twentieth of what it did, and tells bandwidth still."""
    options = ProbeOptions()
    limit = PolicyOptions().gloo_bytes_per_minute
    sends = per_minute(limit, options.period, options.large_every)
    assert sends / 60.0 < MEASURED / 20
    small, large = within(limit, options.period, options.large_every)
    assert small == LATENCY
    assert large == ((4 << 20, BANDWIDTH[0][1]),)


@pytest.mark.parametrize(("limit", "sizes"), [
    (10**12, [8, 1 << 10, 64 << 10, 64 << 20]),
    (30 * 10**6, [8, 1 << 10, 64 << 10, SMALLEST_LARGE]),
    (18 * 10**6, [8, 1 << 10, 64 << 10]),
    (10**6, [8, 1 << 10]),
    (0, []),
])  # fmt: skip
def test_less_is_left_out(limit: int, sizes: list[int]) -> None:
    """The large collective shrinks first, then the largest are left out."""
    small, large = within(limit, 10.0, 6)
    assert [size for size, _ in small + large] == sizes
