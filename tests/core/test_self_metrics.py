"""What the agent says of its own process, on each kernel."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dshealthd.core import self_metrics


@pytest.mark.parametrize(("size", "count"), [(7, 7), (0, 3)])
def test_open_files(size: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the size of the directory since Linux 6.2; before, without that which lists it."""
    kernel = SimpleNamespace(
        stat=lambda _place: SimpleNamespace(st_size=size), listdir=lambda _place: list("0123")
    )
    monkeypatch.setattr(self_metrics, "os", kernel)
    assert self_metrics.open_files() == count
