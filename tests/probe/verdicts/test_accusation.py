"""Whether an adapter's GPU is well, by local rounds since the investigation was opened."""

from __future__ import annotations

import pytest

from dshealthd.probe.observation import RoundKind
from dshealthd.probe.verdicts.accusation import _WAIT, _gpu_is_well
from dshealthd.probe.verdicts.signals import (
    Cause,
    Investigation,
    Measurement,
    ObservedRound,
    Signal,
    SignalHistory,
)

ADAPTER = Signal("fabric", "nccl", "all_reduce", 1, "0")
GPU = Signal("local", "nccl", "matrix_product", 1, "0")
OPENED, DECIDED = 10.0, 20.0


def history(*local: tuple[float, bool]) -> dict[Signal, SignalHistory]:
    """Return the rounds of a slow adapter, and when local ones were and whether they were bad."""
    suspected, gpu = SignalHistory(ADAPTER), SignalHistory(GPU)
    suspected.investigation = Investigation(
        (), OPENED, verdict=(Cause.SELF, "slow"), decided=DECIDED
    )
    for at, bad in local:
        round = ObservedRound(
            0, 0, at, RoundKind.LOCAL, "", near=False, extra=True, led=True, told=None
        )
        gpu.recent.append(Measurement(round, 1.0, bad, not bad, "slow"))
    return {ADAPTER: suspected, GPU: gpu}


@pytest.mark.parametrize(
    ("at", "bad", "expected"),
    [(OPENED + 1, False, True), (OPENED + 1, True, None), (OPENED, False, None)],
    ids=["good", "bad", "before"],
)
def test_local_rounds(*, at: float, bad: bool, expected: bool | None) -> None:
    """Only a good one since then clears the GPU; a bad one is the GPU's own."""
    assert _gpu_is_well("0", history((at, bad)), DECIDED) is expected


def test_no_local_round() -> None:
    """It is waited for, unless it was refused or should have run long ago."""
    rounds = history()
    assert _gpu_is_well("0", rounds, DECIDED + _WAIT) is None
    assert _gpu_is_well("0", rounds, DECIDED + _WAIT + 1) is False
    investigation = rounds[ADAPTER].investigation
    assert investigation is not None
    investigation.home_refused = True
    assert _gpu_is_well("0", rounds, DECIDED) is False
