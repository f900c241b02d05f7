"""What tests of the sender share."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import pytest

from dshealthd.training import step_timer
from tests.training.agents_end import AgentsEnd


@pytest.fixture
def agents_end() -> Iterator[AgentsEnd]:
    """An agent's end that has found no page yet."""
    with contextlib.closing(AgentsEnd()) as end:
        yield end


@pytest.fixture(autouse=True)
def every_step_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure all steps, however short they are, as tests make them."""
    monkeypatch.setattr(step_timer, "SHARE", math.inf)
