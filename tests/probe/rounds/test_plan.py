"""What a round's collectives send."""

from __future__ import annotations

from dshealthd.probe.observation import Backend
from dshealthd.probe.options import ProbeOptions
from dshealthd.probe.rounds.plan import WARM_UP, steps_at
from dshealthd.probe.workers.job import BANDWIDTH, GLOO_BANDWIDTH, LATENCY

MEASURED = 21.8e6
"""Bytes per second that an idle node without GPUs sent when its large collective was of 64 MiB."""


def test_a_node_without_gpus_sends_little() -> None:
    """By default a node sends less than a twentieth of what it did, and tells bandwidth still."""
    options = ProbeOptions()
    epochs = range(2 * options.large_every)
    planned = [steps_at(epoch, options.large_every, Backend.GLOO) for epoch in epochs]
    sent = sum(size * (times + WARM_UP + 1) for steps in planned for size, times in steps)
    assert sent / (len(epochs) * options.period) < MEASURED / 20
    assert planned.count(LATENCY + GLOO_BANDWIDTH) == 2
    assert GLOO_BANDWIDTH[0][0] >= 1 << 20


def test_the_sizes_of_collectives() -> None:
    """Their bytes are label values, which queries name: from the least one to a gradient's."""
    small = [8, 1024, 65536]
    assert [size for size, _ in steps_at(2, 1, Backend.NCCL)] == [*small, 64 * 1024 * 1024]
    assert [size for size, _ in steps_at(2, 1, Backend.GLOO)] == [*small, 4 * 1024 * 1024]


def test_the_large_collective() -> None:
    """It runs in two epochs of 2 * `large_every`, or never; GPUs have a larger one."""
    large = LATENCY + BANDWIDTH
    assert [steps_at(epoch, 3, Backend.NCCL) == large for epoch in range(7)] == [
        *(True, True, False, False, False, False, True)
    ]
    assert {steps_at(epoch, 0, Backend.NCCL) for epoch in range(7)} == {LATENCY}
