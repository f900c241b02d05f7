"""Machines for the tests of the doctor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.doctor.machine import Machine, patient


@pytest.fixture
def make_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Machine]:
    """Return a function that makes a machine, whose doctor has time on a loaded one."""
    patient(monkeypatch)

    def make(gpus: int = 8, profile: str = "h100") -> Machine:
        return Machine(tmp_path / "machine", monkeypatch, capsys, gpus=gpus, profile=profile)

    return make
