"""What holds for the tests of the hooks of Slurm."""

import pytest

from dshealthd.slurm import agent, controller
from tests.probe.conftest import pytest_pyfunc_call

__all__ = ["patient", "pytest_pyfunc_call"]
PATIENT = 30.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give whoever answers the time to, on a busy machine too; tests of hangs shorten it again."""
    monkeypatch.setattr(agent, "TIMEOUT", PATIENT)
    monkeypatch.setattr(controller, "TIMEOUT", PATIENT)
