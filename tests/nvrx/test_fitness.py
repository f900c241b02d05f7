"""Which facts make a node unfit to train, which leave it unknown, and which do not count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dshealthd.collectors.ecc import ERRORS, ROWS_FAILED, THRESHOLD
from dshealthd.collectors.gpu import FAULT, RECOVERY, UP, VISIBLE
from dshealthd.collectors.gpu_bus import EXPECTED
from dshealthd.collectors.kernel_log import LAST_XID
from dshealthd.core.collector import Fault, Reason, Sample
from dshealthd.core.result import CollectionOutcome, CollectionResult, failed, not_available
from dshealthd.core.snapshot import Snapshot
from dshealthd.findings import judgement
from dshealthd.findings.finding import Sign
from dshealthd.findings.gpu_history import BEFORE
from dshealthd.findings.judgement import judge as findings
from dshealthd.findings.judgement import series_of
from dshealthd.findings.series import Series
from dshealthd.nvrx.fitness import Fitness, FitnessCheck, fitness
from dshealthd.probe.metrics import SUSPECT
from tests.snapshots import snapshot

WALL = 1_800_000_000.0
HEALTHY = {
    "gpu": [UP(1, "0", "GPU-a"), UP(1, "1", "GPU-b"), VISIBLE(2), RECOVERY(0, "0", "GPU-a")],
    "gpu_bus": [EXPECTED(2)],
    "ecc": [
        ERRORS(0, "0", "GPU-a", "uncorrected", "volatile"),
        ERRORS(7, "0", "GPU-a", "corrected", "volatile"),
        ERRORS(9, "0", "GPU-a", "uncorrected", "aggregate"),
        ROWS_FAILED(0, "0", "GPU-a"),
    ],
    "kernel_log": [LAST_XID(WALL - 5, "0", "0000:01:00", "13")],
}
"""Two GPUs; Xid 13 is of a program, corrected errors and those of the GPU's whole life are no
reason.
"""


def of(made: Snapshot, own: tuple[Sample, ...] = (), *, now: float = 100.0) -> Fitness:
    """Return how fit node n1 is by these results."""
    return fitness(
        findings(made, series_of(made, own), node="n1", name="n1", monotonic=now, wall=WALL)
    )


def judge(
    *samples: Sample,
    results: dict[str, CollectionResult] | None = None,
    accusations: tuple[Sample, ...] = (),
) -> Fitness:
    """Judge node n1, a healthy one but for these samples of the collector `gpu`, or for these
    results.
    """
    found: dict[str, CollectionResult | tuple[Sample, ...] | None] = {}
    for name, usual in HEALTHY.items():
        own = tuple(usual) + (samples if name == "gpu" else ())
        found[name] = (results or {}).get(name) or own
    return of(snapshot(found, 100.0, WALL), accusations)


def test_fit() -> None:
    """A node on which everything was read and nothing found is fit. A program's Xid does not
    count.
    """
    assert judge() == Fitness((), ())
    assert judge().fit is True


@pytest.mark.parametrize(("sample", "check", "part"), [
    (FAULT(1, "1", "GPU-b", "gpu_lost"), FitnessCheck.GPU_LOST, "GPU 1"),
    (LAST_XID(WALL - 60, "1", "0000:02:00", "79"), FitnessCheck.GPU_LOST, "GPU 1"),
    (LAST_XID(WALL - 60, "", "0000:02:00", "79"), FitnessCheck.GPU_LOST, "GPU 0000:02:00"),
    (ERRORS(1, "1", "GPU-b", "uncorrected", "volatile"), FitnessCheck.MEMORY_UNCORRECTED, "GPU 1"),
    (LAST_XID(WALL - 60, "1", "0000:02:00", "95"), FitnessCheck.MEMORY_UNCORRECTED, "GPU 1"),
    (ROWS_FAILED(1, "1", "GPU-b"), FitnessCheck.MEMORY_WORN_OUT, "GPU 1"),
    (THRESHOLD(1, "1", "GPU-b"), FitnessCheck.MEMORY_WORN_OUT, "GPU 1"),
    (RECOVERY(2, "1", "GPU-b"), FitnessCheck.RESET_NEEDED, "GPU 1"),
    (LAST_XID(WALL - 60, "1", "0000:02:00", "119"), FitnessCheck.RESET_NEEDED, "GPU 1"),
    (FAULT(1, "1", "GPU-b", "reset_required"), FitnessCheck.RESET_NEEDED, "GPU 1"),
])  # fmt: skip
def test_unfit(sample: Sample, check: FitnessCheck, part: str) -> None:
    """Each of these facts alone makes the node unfit, and is named with its GPU."""
    verdict = judge(sample)
    assert verdict.fit is False
    assert [(failure.check, failure.part) for failure in verdict.failures] == [(check, part)]


def test_gpu_missing() -> None:
    """Fewer GPUs in NVML than on the bus make it unfit."""
    verdict = judge(results={"gpu_bus": CollectionResult(CollectionOutcome.OK, (EXPECTED(3),))})
    assert [failure.check for failure in verdict.failures] == [FitnessCheck.GPU_LOST]


@pytest.mark.parametrize("results", [
    {"gpu_bus": not_available("no NVIDIA GPU on the PCI bus"), "gpu": not_available("none")},
    {"gpu_bus": CollectionResult(CollectionOutcome.OK, (EXPECTED(2),))},
], ids=["all", "some"])  # fmt: skip
def test_gpus_gone_from_the_bus(results: dict[str, CollectionResult]) -> None:
    """A node that has had GPUs which are gone, all or some, is unfit; one that never had more is
    fit.
    """
    verdict = judge(results=results, accusations=(BEFORE(8),))
    assert [failure.check for failure in verdict.failures] == [FitnessCheck.GPU_LOST]
    assert judge(accusations=(BEFORE(2),)).fit is True


HANGS = Fault("gpu 1", Reason.TIMEOUT, "nvmlDeviceGetTotalEccErrors")


@pytest.mark.parametrize("results", [
    {"gpu": failed(Reason.VERSION_MISMATCH, "nvmlInit")},
    {"gpu": failed(Reason.NOT_LOADED, "nvmlInit")},
    {"gpu": failed(Reason.STUCK, "nvmlInit")},
    {"ecc": CollectionResult(CollectionOutcome.OK, (), (HANGS,))},
])  # fmt: skip
def test_nvml_broken(results: dict[str, CollectionResult]) -> None:
    """NVML that cannot be loaded, or hangs, also for one GPU, makes the node unfit: CUDA does not
    work either.
    """
    verdict = judge(results=results)
    assert [(failure.check, failure.part) for failure in verdict.failures] == [
        (FitnessCheck.NVML_BROKEN, "node")
    ]


@pytest.mark.parametrize("results", [
    {"gpu": failed(Reason.PERMISSION_DENIED, "may not")},
    {"gpu": failed(Reason.INTERNAL, "defect")},
    {"gpu": not_available("an operator wants the GPUs free")},
    {"kernel_log": failed(Reason.PERMISSION_DENIED, "/dev/kmsg")},
    {"ecc": CollectionResult(CollectionOutcome.OK, (), (Fault("gpu 1", Reason.MALFORMED, "odd"),))},
])  # fmt: skip
def test_unknown(results: dict[str, CollectionResult]) -> None:
    """Where the agent could not look, the node is neither fit nor unfit."""
    verdict = judge(results=results)
    assert (verdict.fit, verdict.failures) == (None, ())
    assert len(verdict.unknown) == len(results)


def test_finding_beside_the_unknown() -> None:
    """A finding counts whatever else is unknown."""
    assert (
        judge(
            FAULT(1, "1", "GPU-b", "gpu_lost"), results={"kernel_log": failed(Reason.IO_ERROR, "x")}
        ).fit
        is False
    )


def test_expired() -> None:
    """Samples that are too old say nothing, neither good nor bad."""
    made = snapshot({"gpu": tuple(HEALTHY["gpu"])}, 100.0, WALL)
    assert of(made, now=116.0).fit is None


def test_machine_without_gpus() -> None:
    """A machine that never had a GPU is fit."""
    absent = {name: not_available("no GPU") for name in ("gpu", "gpu_bus", "ecc")}
    assert judge(results=absent).fit is True


def test_accused() -> None:
    """The node that this agent's probes accuse themselves is unfit. Other nodes, links and leaves
    are not its affair.
    """
    own = SUSPECT(1, "gpu", "n1/gpu3", "slow")
    others = (
        SUSPECT(1, "node", "n11", "failed"),
        SUSPECT(1, "link", "n1--n2", "slow"),
        SUSPECT(1, "leaf", "n1", "slow"),
    )
    verdict = judge(accusations=(own, *others))
    assert [(failure.check, failure.part) for failure in verdict.failures] == [
        (FitnessCheck.SUSPECT, "n1/gpu3")
    ]
    assert judge(accusations=others).fit is True


def test_node_that_is_still_being_read_is_unknown() -> None:
    """Until each source has a result, nothing follows from what is not found; a failure that is
    known already counts.
    """
    healthy: Any = HEALTHY
    for late in ({"memory": None}, dict.fromkeys(HEALTHY)):
        assert of(snapshot({**healthy, **late}, 100.0, WALL)).fit is None
    assert of(snapshot({}, 100.0, WALL)).fit is None
    lost: Any = {**HEALTHY, "gpu": [*HEALTHY["gpu"], FAULT(1, "1", "GPU-b", "gpu_lost")]}
    assert of(snapshot({**lost, "memory": None}, 100.0, WALL)).fit is False


@pytest.mark.parametrize(("rule", "fit"), [
    ("gpus.lost", None),
    ("gpu_links.nvlink", None),
    ("agent.suspects_here", None),
    ("gpu_links.nvlink_errors", True),
    ("storage.paths", True),
])  # fmt: skip
def test_a_defect_in_a_rule_that_fitness_goes_by_is_unknown(
    rule: str,
    fit: bool | None,  # noqa: FBT001 - a case
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another rule's defect, which one user's job may have caused, blinds no scheduler."""

    def broken(_series: Series, _wall: float) -> Iterator[Sign]:
        yield Sign("DshealthdGpuLost", value=1 / len(()))

    module, broken.__name__ = rule.split(".")
    broken.__module__ = f"dshealthd.findings.{module}"
    monkeypatch.setattr(judgement, "RULES", (broken,))
    assert judge().fit is fit
