"""Agents that commands query."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dshealthd.core.collector import Sample
from dshealthd.http import client
from tests.status.nodes import HEALTHY, run, snapshot
from tests.web.serving import serving


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give agents the time to answer, on a busy machine too."""
    monkeypatch.setattr(client, "TIMEOUT", 60.0)


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a command on an agent with more samples, and returns its
    output.
    """

    def of(command: str, *samples: Sample, code: int = 0) -> str:
        with serving(snapshot(*HEALTHY, *samples)) as served:
            assert run(command, f"127.0.0.1:{served.port}") == code
        return capsys.readouterr().out

    return of
