"""Whether an adapter's GPU is well, by local rounds since the investigation was opened."""

from __future__ import annotations

import pytest

from dshealthd.probe.observation import Part, RoundKind
from dshealthd.probe.verdicts.accusation import (
    Verdicts,
    _gpu_is_well,
    accusations,
    waits_for_home,
)
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
OPENED, DECIDED = 1010.0, 1020.0


def history(
    *local: tuple[float, bool], part: str = "0", of: Signal = GPU
) -> dict[Signal, SignalHistory]:
    """Return the rounds of a slow adapter, and when local ones were and whether they were bad."""
    adapter = ADAPTER._replace(part=part)
    suspected, gpu = SignalHistory(adapter), SignalHistory(of)
    suspected.investigation = Investigation(
        (), OPENED, verdict=(Cause.SELF, "slow"), decided=DECIDED
    )
    for at, bad in local:
        round = ObservedRound(
            0, 0, at, RoundKind.LOCAL, "", near=False, extra=True, led=True, told=None
        )
        gpu.recent.append(Measurement(round, 1.0, bad, not bad, "slow"))
        suspected.recent.append(Measurement(round, 1.0, bad=True, good=False, reason="slow"))
    return {adapter: suspected, of: gpu}


@pytest.mark.parametrize(
    ("at", "bad", "expected"),
    [(OPENED + 1, False, True), (OPENED + 1, True, None), (OPENED, False, None)],
    ids=["good", "bad", "before"],
)
def test_local_rounds(*, at: float, bad: bool, expected: bool | None) -> None:
    """Only a good one since then clears the GPU; a bad one is the GPU's own."""
    assert _gpu_is_well("0", history((at, bad)), DECIDED) is expected


@pytest.mark.parametrize(
    ("part", "of", "expected"),
    [
        ("0", GPU._replace(part="1"), None),
        ("mlx5_0", GPU, True),  # whose GPU is it?
        ("mlx5_0", OWN_NODE, None),
    ],
)
def test_whose_local_rounds(part: str, of: Signal, *, expected: bool | None) -> None:
    """Those of the adapter's GPU; of any, where its name does not say which that is."""
    assert _gpu_is_well(part, history((OPENED + 1, False), part=part, of=of), DECIDED) is expected


def test_a_gpu_that_is_investigated_itself() -> None:
    """It is not well, whatever its last round was; how its own case stands is nothing to its
    adapter.
    """
    rounds = history((OPENED + 1, False))
    rounds[GPU].investigation = Investigation((), OPENED, home_refused=True)
    assert _gpu_is_well("0", rounds, DECIDED) is None
    rounds[GPU].recent.clear()
    assert _gpu_is_well("0", rounds, DECIDED) is None


def test_local_rounds_since_the_first_of_several() -> None:
    """One counts for all sizes that are investigated, if it came after the first was."""
    rounds = history((OPENED + 1, False))
    other = rounds[ADAPTER._replace(size=2)] = SignalHistory(ADAPTER)
    other.investigation = Investigation((), OPENED + 2)
    assert _gpu_is_well("0", rounds, DECIDED) is True


@pytest.mark.parametrize(
    ("signal", "cause", "waits"),
    [
        (ADAPTER, Cause.SELF, True),
        (ADAPTER, Cause.UNCLEAR, False),
        (GPU, Cause.SELF, False),
        (RUN, Cause.SELF, False),
    ],
)
def test_a_local_round_that_is_needed(signal: Signal, cause: Cause, *, waits: bool) -> None:
    """For an adapter, until its GPU is known to be well."""
    assert waits_for_home(history(), {signal: (cause, "slow")}, DECIDED) is waits
    known = history((OPENED + 1, False))
    assert not waits_for_home(known, {signal: (cause, "slow")}, DECIDED)


def test_no_local_round() -> None:
    """It is waited for, unless it was refused or should have run long ago."""
    rounds = history()
    other = rounds[ADAPTER._replace(size=4)] = SignalHistory(ADAPTER)
    other.investigation = Investigation((), OPENED)
    assert _gpu_is_well("0", rounds, DECIDED + WAIT) is None, "another size is undecided"
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
    (one,) = history((0.0, True))[GPU].recent
    rounds = {OWN_NODE: SignalHistory(OWN_NODE)}
    rounds[OWN_NODE].recent.extend([one, one])
    verdicts: Verdicts = {}
    for gpu in range(gpus):
        signal = GPU._replace(part=str(gpu))
        adapter = ADAPTER._replace(part=f"mlx5_{gpu // 2}")
        rounds |= {signal: SignalHistory(signal), adapter: SignalHistory(adapter)}
        rounds[adapter].recent.extend([one, one])
        if gpu < slow:
            verdicts[signal] = Cause.SELF, "slow"
        elif gpu < slow + uneasy:
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


@pytest.mark.parametrize(
    ("part", "at", "verdicts", "expected"),
    [
        ("0", 1.0, {"0": SLOW}, ["nic me/nic0 slow"]),
        ("mlx5_0", 1.0, {"mlx5_0": SLOW}, ["nic me/mlx5_0 slow"]),
        ("0", 1.0, {"0": UNCLEAR}, ["nic me/nic0 ambiguous"]),
        ("0", -1.0, {"0": SLOW}, []),
        ("0", -1.0, {"0": SLOW, "gpu": SLOW}, ["gpu me/gpu0 slow"]),
    ],
)
def test_which_part_of_a_rail(
    part: str, at: float, verdicts: dict[str, tuple[Cause, str]], expected: list[str]
) -> None:
    """Its adapter if the GPU is known to be well, unless that is unclear; not beside its GPU."""
    rounds = history((OPENED + at, False), part=part)
    found = {
        GPU if key == "gpu" else ADAPTER._replace(part=key): one for key, one in verdicts.items()
    }
    late = DECIDED + 2 * WAIT * (len(verdicts) > 1)
    told = accusations("me", "leaf", rounds, found, late)
    assert [f"{one.part} {one.component} {one.reason}" for one in told] == expected


def test_parts_above_their_usual_hide_nothing() -> None:
    """Where none of them is flagged, what is unclear of the node is told."""
    (one,) = history((0.0, True))[GPU].recent
    rounds = {signal: SignalHistory(signal) for signal in (REACH, *ALL_GPUS)}
    for signal in ALL_GPUS:
        rounds[signal].recent.extend([one, one])
    (found,) = accusations("me", "leaf", rounds, {REACH: UNCLEAR}, DECIDED)
    assert (found.part, found.reason) == (Part.NODE, "ambiguous")
