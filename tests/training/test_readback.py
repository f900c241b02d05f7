"""Scalars that a job computes: numbers at once, those of a device once they have come."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dshealthd.training.readback import Readback
from tests.training.lazy import Lazy

torch: Any = Lazy("torch")


def sharded() -> Any:
    """Return a tensor of a subclass, which may ask other ranks for its value."""
    return type("DTensor", (torch.Tensor,), {"detach": None})(torch.tensor([2.5]))


@pytest.mark.parametrize(("offered", "read"), [
    (lambda: 2.5, 2.5),
    (lambda: 3, 3.0),
    (lambda: torch.tensor([[2.5]]), 2.5),
    (lambda: torch.ones(3), None),
    (lambda: torch.ones(1, device="meta"), None),
    (sharded, None),
    (lambda: "loss", None),
])  # fmt: skip
def test_what_is_read(offered: Callable[[], Any], read: float | None) -> None:
    """A number, or the only element of a plain tensor on a device that is known; once each."""
    readback = Readback()
    readback.offer(offered(), 1.0)
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
    monkeypatch.setattr("torch.Tensor", SimpleNamespace)
    other: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"), numel=lambda: 1)
    readback.offer(other, 1.09)
    assert readback.poll() is None
    other.detach = loss.new_tensor(3.5).detach
    readback.offer(other, 1.1, 9)
    assert (readback.poll(), readback.step) == (3.5, 9)
