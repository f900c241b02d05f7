"""`dshealthd explain` on what PyTorch's watchdog and heartbeat monitor print over genuine NCCL."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dshealthd.explain import command
from tests.nccl.pytorch.launch import Training

if TYPE_CHECKING:
    from pathlib import Path

    from dshealthd.explain.causality import Finding
    from tests.nccl.pytorch.wheel import Wheel

pytestmark = [pytest.mark.nccl, pytest.mark.timeout(1800)]

SIZE = 4
CULPRIT = 2
TIMEOUT = 6.0
"""Seconds of a collective, after which the watchdog ends the rank."""
HEARTBEAT = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "15"}


def explained(training: Training) -> Finding:
    """Return what all that was printed says."""
    recognizer, unread = command.read([str(log) for log in training.logs])
    assert unread == []
    return command.conclude(recognizer)


@pytest.mark.parametrize("torchrun", [True, False], ids=["torchrun", "alone"])
def test_well(torchrun: bool, cuda_torch: Wheel, tmp_path: Path) -> None:  # noqa: FBT001 - a parameter of the test
    """A training that ends well has no failure."""
    with Training(cuda_torch, tmp_path, fault="none", size=SIZE, torchrun=torchrun) as training:
        training.wait_for_end()
        assert [process.returncode for process in training.processes] == [0] * (
            1 if torchrun else SIZE
        ), training.text()
    finding = explained(training)
    assert finding.outcome == "nothing", finding.statement


@pytest.mark.parametrize("fault", ["absent", "stopped", "other-operation", "other-size"])
def test_timeout_under_torchrun(fault: str, cuda_torch: Wheel, tmp_path: Path) -> None:
    """The rank is named for which the others' watchdogs waited, or that did what they did not."""
    with Training(
        cuda_torch,
        tmp_path,
        fault=fault,
        culprit=CULPRIT,
        size=SIZE,
        timeout=TIMEOUT,
        torchrun=True,
    ) as training:
        training.wait_for_end()
    finding = explained(training)
    assert "Watchdog caught collective operation timeout" in training.text()
    assert (finding.slug, finding.ranks) == ("nccl-timeout", (CULPRIT,)), finding.statement


@pytest.mark.parametrize("fault", ["stopped", "killed"])
def test_lost_rank_without_a_launcher(fault: str, cuda_torch: Wheel, tmp_path: Path) -> None:
    """Nobody says what became of the rank but the watchdogs of those that waited for it."""
    with Training(
        cuda_torch, tmp_path, fault=fault, culprit=CULPRIT, size=SIZE, timeout=TIMEOUT
    ) as training:
        training.wait_for_end(CULPRIT)
    finding = explained(training)
    assert (finding.slug, finding.ranks) == ("nccl-timeout", (CULPRIT,)), finding.statement


@pytest.mark.parametrize("fault", ["killed", "raises"])
def test_ended_rank_under_torchrun(fault: str, cuda_torch: Wheel, tmp_path: Path) -> None:
    """A rank that was killed, or raised, is the cause, however its peers end."""
    with Training(
        cuda_torch,
        tmp_path,
        fault=fault,
        culprit=CULPRIT,
        size=SIZE,
        timeout=TIMEOUT,
        torchrun=True,
    ) as training:
        training.wait_for_end()
    finding = explained(training)
    assert (finding.slug, finding.ranks) == ("child-failed", (CULPRIT,)), finding.statement


def test_symmetric(cuda_torch: Wheel, tmp_path: Path) -> None:
    """Where all have entered the same collective no rank is named."""
    with Training(
        cuda_torch, tmp_path, fault="symmetric", size=SIZE, timeout=TIMEOUT, torchrun=True
    ) as training:
        training.wait_for_end()
    finding = explained(training)
    assert (finding.slug, finding.ranks) == ("nccl-timeout", ()), finding.statement


@pytest.mark.parametrize("torchrun", [True, False], ids=["torchrun", "alone"])
def test_blocked_watchdog(torchrun: bool, cuda_torch: Wheel, tmp_path: Path) -> None:  # noqa: FBT001 - a parameter of the test
    """The heartbeat monitor ends a rank whose watchdog hangs in the driver: that rank is named."""
    with Training(
        cuda_torch,
        tmp_path,
        fault="silent-driver",
        culprit=CULPRIT,
        size=SIZE,
        timeout=600,
        torchrun=torchrun,
        environment=HEARTBEAT,
    ) as training:
        if torchrun:
            training.wait_for_end()
        else:
            training.wait_for_end(*(rank for rank in range(SIZE) if rank != CULPRIT))
    assert "watchdog got stuck for 15 seconds" in training.text()
    finding = explained(training)
    assert (finding.slug, finding.ranks) == ("nccl-timeout", (CULPRIT,)), finding.statement
