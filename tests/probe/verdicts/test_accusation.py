"""Whether an adapter's GPU is well, by local rounds since the investigation was opened."""

from __future__ import annotations

import pytest

from dshealthd.probe.observation import Part, RoundKind
from dshealthd.probe.verdicts.accusation import Verdicts, _gpu_is_well, accusations
from dshealthd.probe.verdicts.signals import (
    OWN_NODE,
    REACH,
    RUN,
    Cause,
    Investigation,
    Measurement,
    ObservedRound,
    Signal,
    SignalHistory,
)

WAIT = 60.0

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
    assert _gpu_is_well("0", rounds, DECIDED + WAIT) is None
    assert _gpu_is_well("0", rounds, DECIDED + WAIT + 1) is False
    investigation = rounds[ADAPTER].investigation
    assert investigation is not None
    others = history()[ADAPTER], SignalHistory(ADAPTER)
    assert others[0].investigation is not None
    others[0].investigation.home_refused = True
    rounds |= {ADAPTER._replace(part="1"): others[0], ADAPTER._replace(size=3): others[1]}
    assert _gpu_is_well("0", rounds, DECIDED) is None, "of this adapter"
    investigation.home_refused = True
    assert _gpu_is_well("0", rounds, DECIDED) is False
    rounds[ADAPTER._replace(size=2)] = history()[ADAPTER]
    assert _gpu_is_well("0", rounds, DECIDED) is False, "for one of its sizes"


def accused(gpus: int, slow: int, uneasy: int = 0) -> list[tuple[Part, str]]:
    """Return who is accused on a node with so many GPUs, of which some are slow and others above
    their usual, though not flagged.
    """
    rounds = {OWN_NODE: SignalHistory(OWN_NODE)}
    verdicts: Verdicts = {}
    for gpu in range(gpus):
        signal = GPU._replace(part=str(gpu))
        adapter = ADAPTER._replace(part=f"mlx5_{gpu}")
        rounds |= {signal: SignalHistory(signal), adapter: SignalHistory(adapter)}
        if gpu < slow:
            verdicts[signal] = Cause.SELF, "slow"
        elif gpu < slow + uneasy:
            (one,) = history((0.0, True))[GPU].recent
            rounds[signal].recent.extend([one, one])
    return [
        (one.part, one.component) for one in accusations("me", "leaf", rounds, verdicts, DECIDED)
    ]


GPUS = [(Part.GPU, f"me/gpu{gpu}") for gpu in range(4)]
NODE = [(Part.NODE, "me")]


@pytest.mark.parametrize(
    ("gpus", "slow", "uneasy", "expected"),
    [
        (8, 3, 0, GPUS[:3]),
        (8, 4, 0, NODE),
        (8, 3, 1, NODE),
        (8, 2, 1, GPUS[:2]),
        (3, 1, 0, GPUS[:1]),
        (3, 2, 0, NODE),
        (2, 1, 0, GPUS[:1]),
        (2, 2, 0, NODE),
        (1, 1, 0, GPUS[:1]),
        (8, 0, 4, []),
    ],
)
def test_half_of_the_parts_are_the_node(
    gpus: int, slow: int, uneasy: int, expected: list[tuple[Part, str]]
) -> None:
    """At least two, with those that are above their usual; a GPU that is alone is the GPU. Adapters
    are counted apart.
    """
    assert accused(gpus, slow, uneasy) == expected


SLOW, HUNG = (Cause.SELF, "slow"), (Cause.SELF, "hung")
LEAF, UNCLEAR = (Cause.LEAF, "unreachable"), (Cause.UNCLEAR, "unreachable")
ALL_GPUS = dict.fromkeys((GPU._replace(part=part) for part in "0123"), SLOW)


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ({REACH: LEAF, RUN: HUNG}, ["leaf leaf unreachable"]),
        ({REACH: LEAF, RUN: HUNG, GPU: SLOW}, ["leaf leaf unreachable", "node me hung"]),
        ({REACH: (Cause.FABRIC, "slow")}, ["leaf fabric ambiguous"]),
        ({REACH: UNCLEAR, GPU: SLOW}, ["node me ambiguous", "gpu me/gpu0 slow"]),
        ({REACH: UNCLEAR, **ALL_GPUS}, ["node me slow"]),
    ],
)
def test_a_larger_part_explains_smaller_ones(verdicts: Verdicts, expected: list[str]) -> None:
    """A leaf as many signals as are its own; a node its parts. What is unclear adds nothing to a
    node that is named.
    """
    rounds = {signal: SignalHistory(signal) for signal in verdicts}
    found = accusations("me", "leaf", rounds, verdicts, DECIDED)
    assert [f"{one.part} {one.component} {one.reason}" for one in found] == expected
