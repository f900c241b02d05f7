"""Scalars that a job computes: numbers at once, those of a device once they have come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dshealthd.training.readback import Readback
from tests.training.lazy import Lazy

torch: Any = Lazy("torch")


def scalar(device: str, value: float, count: int = 1) -> Any:
    """Return what looks like a tensor on a device."""
    return SimpleNamespace(
        device=SimpleNamespace(type=device), numel=lambda: count, detach=lambda: value
    )


@pytest.mark.parametrize(("offered", "read"), [
    (2.5, 2.5),
    (3, 3.0),
    (scalar("cpu", 2.5), 2.5),
    (scalar("cpu", 2.5, count=3), None),
    (scalar("mps", 2.5), None),
    ("loss", None),
])  # fmt: skip
def test_what_is_read(offered: Any, read: float | None) -> None:
    """A number, or the only element of a tensor on a device that is known; once each."""
    readback = Readback()
    readback.offer(offered, 1.0)
    assert (readback.poll(), readback.poll(), readback.value) == (read, None, read)


def test_default_device_is_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where new tensors are on another device by default, the loss is read all the same."""
    made = []
    real = torch.empty

    def empty(*size: int, pin_memory: bool, **named: Any) -> Any:
        made.append(real(*size, **named))
        assert pin_memory
        return made[0]

    stream = SimpleNamespace(
        Event=lambda: SimpleNamespace(record=lambda _: None, query=lambda: True),
        is_current_stream_capturing=lambda: False,
        current_stream=lambda _: None,
    )
    loss = torch.tensor(2.5)
    with torch.device("meta"):
        assert torch.empty(1).device.type == "meta"
    monkeypatch.setattr("torch.cuda", stream)
    monkeypatch.setattr("torch.empty", empty)  # pinned memory needs a GPU
    readback = Readback()
    with torch.device("meta"):
        readback._copy(loss, 1.0, 7)
    assert made[0].device.type == "cpu"
    assert (readback.poll(), readback.step) == (2.5, 7)
    # The next copy is a tenth of a second later.
    other: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"), numel=lambda: 1)
    readback.offer(other, 1.09)
    assert readback.poll() is None
    other.detach = loss.new_tensor(3.5).detach
    readback.offer(other, 1.1, 9)
    assert (readback.poll(), readback.step) == (3.5, 9)
