"""Plain torch, on the CPU: which steps are seen, and what is told of them."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dshealthd.training import attach, step_timer, watch
from dshealthd.training.heartbeat import Heartbeat
from dshealthd.training.message import StepStage
from dshealthd.training.optimizer import _driven_by_engine
from tests.training.agents_end import AgentsEnd
from tests.training.lazy import Lazy

torch: Any = Lazy("torch")


class Trial:
    """A small training."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(8, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def loss(self) -> Any:
        """Return the loss of a batch."""
        return self.model(torch.randn(4, 8)).square().mean()

    def step(self) -> Any:
        """Make a step and return its loss."""
        loss = self.loss()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


@pytest.fixture
def trial() -> Trial:
    """A training that has not begun."""
    return Trial()


@pytest.fixture
def unchanged() -> Iterator[Heartbeat]:
    """The hook for programs that are not changed, which have imported torch; gone after the
    test.
    """
    assert torch.optim
    heartbeat = watch.register()
    yield heartbeat
    heartbeat.close()


def test_optimizer(agents_end: AgentsEnd, trial: Trial) -> None:
    """Each step of the optimizer is told, until the heartbeat is closed."""
    other = Trial()
    with attach(optimizer=trial.optimizer, step=10):
        for step in (11, 12, 13):
            trial.step()
            other.step()
            assert agents_end.message().step == step
    trial.step()
    assert agents_end.message().step == 13


def test_optimizer_that_wraps(agents_end: AgentsEnd, trial: Trial) -> None:
    """An object that holds torch's optimizer, as Accelerate's does, is looked through."""

    class Wrapper:
        optimizer = trial.optimizer

    with attach(optimizer=Wrapper()):
        trial.step()
        assert agents_end.message().step == 1


def test_loss_and_norm(agents_end: AgentsEnd, trial: Trial) -> None:
    """A loss and a norm that are handed over as tensors are told with the next step."""
    with attach(optimizer=trial.optimizer) as heartbeat:
        heartbeat.loss(trial.loss())
        heartbeat.gradient_norm(torch.nn.utils.clip_grad_norm_(trial.model.parameters(), 1.0))
        trial.step()
        first = agents_end.message()
        assert (first.loss_finite, first.finite_step, first.gradient_norm) == (True, 1, 0.0)
        heartbeat.loss(torch.tensor([math.nan], dtype=torch.bfloat16))
        trial.step()
        second = agents_end.message()
        assert (second.loss_finite, second.finite_step, second.nonfinite_step) == (False, 1, 2)
        heartbeat.loss(torch.zeros(3))  # no scalar: left unread
        trial.step()
        third = agents_end.message()
        assert (third.step, third.loss_finite, third.nonfinite_step) == (3, False, 2)


def test_scaler(agents_end: AgentsEnd, trial: Trial) -> None:
    """Steps that a scaler skips, and its scale, are told; its methods are given back."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    found = []
    with attach(optimizer=trial.optimizer, scaler=scaler):
        for factor in (1.0, math.inf, math.inf, 1.0, 1.0):
            loss = trial.loss() * factor
            trial.optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(trial.optimizer)
            scaler.update()
            message = agents_end.message()
            found.append((message.step, message.skipped, message.loss_scale))
    assert found == [(1, 0, 1024.0), (2, 1, 512.0), (3, 2, 256.0), (4, 2, 256.0), (5, 2, 512.0)]
    assert "update" not in vars(scaler)


def test_scaler_that_is_off(agents_end: AgentsEnd, trial: Trial) -> None:
    """A scaler that is not enabled skips nothing, and the optimizer's own steps are told."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with attach(optimizer=trial.optimizer, scaler=scaler):
        trial.step()
        message = agents_end.message()
    assert (message.step, message.skipped, message.loss_scale) == (1, None, None)


def test_any_optimizer(unchanged: Heartbeat, agents_end: AgentsEnd, trial: Trial) -> None:
    """Without a call in the script, the first optimizer that steps is the training's."""
    second = Trial()
    for step in (1, 2, 3):
        trial.step()
        second.step()
        assert agents_end.message().step == step
    assert not unchanged.closed


def test_any_optimizer_that_is_replaced(unchanged: Heartbeat, agents_end: AgentsEnd) -> None:
    """When the first optimizer is gone, the one that steps next takes its place."""
    Trial().step()
    assert agents_end.message().step == 1
    replacement = Trial()
    replacement.step()
    assert agents_end.message().step == 2
    assert not unchanged.closed


def test_any_optimizer_that_is_done(unchanged: Heartbeat, agents_end: AgentsEnd) -> None:
    """One that makes no step any more, though it is kept, as after a warm-up or in a sweep, leaves
    its place to another after ten steps of that one; not to one that steps between its own.
    """
    warmup, main, beside = Trial(), Trial(), Trial()
    for _ in range(3):
        warmup.step()
        for _ in range(9):
            main.step()
    assert agents_end.message().step == 3
    for step in (4, 5, 6):
        main.step()
        beside.step()
        assert agents_end.message().step == step
    assert not unchanged.closed


def test_a_model_that_is_searched_for_later(
    unchanged: Heartbeat, agents_end: AgentsEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soon after a search for another model none is made: then a model has stages from a later
    step on.
    """
    Trial().step()
    trial = Trial()
    for share, stage in ((0.0, StepStage.UNKNOWN), (math.inf, StepStage.BACKWARD)):
        monkeypatch.setattr(step_timer, "SHARE", share)
        trial.step()
        trial.loss()
        assert agents_end.message().stage == stage
    assert not unchanged.closed


def test_optimizer_that_deepspeed_steps(
    unchanged: Heartbeat, agents_end: AgentsEnd, trial: Trial, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps of DeepSpeed without a known engine are not counted, and the log says what to do."""
    code = compile(
        "def step(optimizer):\n    optimizer.step()\n",
        "/site-packages/deepspeed/runtime/zero/stage_1_and_2.py",
        "exec",
    )
    place: dict[str, Any] = {}
    exec(code, place)
    place["step"](trial.optimizer)
    place["step"](trial.optimizer)
    assert agents_end.messages() == []
    (record,) = (one for one in caplog.records if one.name == "dshealthd.training")
    assert record.message.endswith(
        "its engine was not found; call dshealthd.training.attach(engine)"
    )
    assert not unchanged.closed


def test_engine_that_is_found(
    unchanged: Heartbeat, agents_end: AgentsEnd, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine that makes an optimizer's steps is followed from then on, as by `attach`."""

    # torch is imported where it is installed
    class DeepSpeedEngine(torch.nn.Module):  # type: ignore[misc]
        """What of an engine is used."""

        def __init__(self) -> None:
            super().__init__()
            self.global_steps = 7
            self.skipped_steps = 0
            self.module = trial.model
            self.optimizer = self.basic_optimizer = trial.optimizer

        def backward(self, loss: float) -> None:
            """Compute nothing."""

        def fp16_enabled(self) -> bool:
            """Return whether there is a loss scale."""
            return False

        def get_global_grad_norm(self) -> None:
            """Return no norm."""

    code = "def step(self):\n    self.optimizer.step()\n    self.global_steps += 1\n"
    place: dict[str, Any] = {}
    exec(compile(code, "/site-packages/deepspeed/runtime/engine.py", "exec"), place)
    DeepSpeedEngine.step = place["step"]
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(DeepSpeedEngine=DeepSpeedEngine))
    engine = DeepSpeedEngine()
    trial.optimizer.zero_grad()
    engine.step()
    assert agents_end.messages() == []
    engine.backward(float("nan"))
    engine.step()
    message = agents_end.message()
    assert (message.step, message.loss_finite) == (9, False)
    unchanged.close()
    assert "step" not in vars(engine)


def test_losses_of_an_unchanged_program(
    unchanged: Heartbeat, agents_end: AgentsEnd, trial: Trial
) -> None:
    """The scalar whose backward pass is called is the loss, until the heartbeat is closed."""
    backward = torch.Tensor.backward
    trial.step()
    assert agents_end.message().loss_finite is None  # torch was not yet followed
    trial.step()
    assert agents_end.message().loss_finite is True
    (next(trial.model.parameters()).sum() * float("nan")).backward()
    trial.optimizer.step()
    assert agents_end.message().loss_finite is False
    assert agents_end.message().nonfinite_step == 3
    unchanged.close()
    assert torch.Tensor.backward is backward


@pytest.mark.parametrize(("between", "found"), [(10, True), (11, False)])
def test_how_far_an_engine_may_be(between: int, *, found: bool) -> None:
    """DeepSpeed's step is looked for in twelve frames of the stack."""
    scope: dict[str, Any] = {}
    exec(compile("def step(call): return call()", "/x/deepspeed/runtime/engine.py", "exec"), scope)

    def nested(more: int) -> bool:
        return nested(more - 1) if more else _driven_by_engine()

    assert scope["step"](functools.partial(nested, between - 1)) is found
