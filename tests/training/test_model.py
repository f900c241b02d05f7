"""Stages of steps and their times, of real torch modules on the CPU."""

from __future__ import annotations

import copy
import io
import time
import warnings
from contextlib import nullcontext
from typing import Any

import pytest

from dshealthd.training import attach, watch
from dshealthd.training.message import StepStage
from tests.training.agents_end import AgentsEnd
from tests.training.lazy import Lazy
from tests.training.step_clock import average

ALIKE = 10

torch: Any = Lazy("torch")
models: Any = Lazy("tests.training.models")


def make_step(model: Any, optimizer: Any, micro_steps: int = 1) -> None:
    """Train for a step."""
    for _ in range(micro_steps):
        model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_stages(agents_end: AgentsEnd) -> None:
    """Forward, backward and input are told as they begin."""
    model = models.Slow(agents_end)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(optimizer=optimizer, model=model) as heartbeat:
        heartbeat.enter("other")
        assert models.stage(agents_end) == StepStage.UNKNOWN
        for step in (1, 2):
            loss = model(torch.randn(4, 8)).square().mean()
            assert models.stage(agents_end) == StepStage.BACKWARD
            before = time.monotonic()
            loss.backward()
            assert models.stage(agents_end) == StepStage.BACKWARD
            assert agents_end.message().sent < before
            optimizer.step()
            assert (models.stage(agents_end), agents_end.message().step) == (StepStage.INPUT, step)
    assert model.stages == [StepStage.FORWARD, StepStage.FORWARD]
    assert "__call__" not in vars(models.Slow)


def test_forward_passes(agents_end: AgentsEnd) -> None:
    """Under accumulation the rank tells which forward pass of how many it is in: once they are as
    many in each step, also where a single step has more, and not where the number keeps changing.
    """
    model = models.Slow(agents_end)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def passes() -> tuple[int, int]:
        message = agents_end.message()
        return message.forward_pass, message.forward_passes

    with attach(optimizer=optimizer, model=model):
        for _ in range(ALIKE):
            make_step(model, optimizer, micro_steps=3)
            assert passes() == (0, 0)
        make_step(model, optimizer, micro_steps=3)
        assert passes() == (0, 3)
        for number in (1, 2, 3):
            model(torch.randn(4, 8)).square().mean().backward()
            assert passes() == (number, 3)
        optimizer.step()
        for _ in range(ALIKE):
            make_step(model, optimizer, micro_steps=3)
        make_step(model, optimizer, micro_steps=4)
        assert passes() == (0, 3)
        for more in (5, 6):
            make_step(model, optimizer, micro_steps=more)
        assert passes() == (0, 0)


def test_times(agents_end: AgentsEnd) -> None:
    """The input has a time of its own."""
    model = models.Slow(agents_end, 0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    waited: list[float] = []
    ended: list[float] = []
    began: list[float] = []
    # Before the heartbeat sees the end of a step, and after it saw the begin of a forward pass.
    optimizer.register_step_post_hook(lambda *_: ended.append(time.perf_counter()))
    model.register_forward_pre_hook(lambda *_: began.append(time.perf_counter()))
    with attach(optimizer=optimizer, model=model):
        for _ in range(15):
            started = time.perf_counter()
            time.sleep(0.01)
            waited.append(time.perf_counter() - started)
            make_step(model, optimizer, micro_steps=2)
        message = agents_end.message()
    # That of the first step is not known, nor how long the second forward pass was waited for.
    most = [begin - end for begin, end in zip(began[2::2], ended[:-1], strict=True)]
    assert message.input_seconds is not None
    assert message.mean_seconds is not None
    assert average(waited[1:]) <= message.input_seconds <= average(most)
    assert message.input_seconds + 2 * min(model.took) < message.mean_seconds


@pytest.mark.parametrize("marked", [True, False])
def test_pause_is_no_input(agents_end: AgentsEnd, marked: bool) -> None:  # noqa: FBT001
    """An evaluation between two steps is no wait for input, nor are its forward passes training's,
    nor is it in the time of a step. It is told, unless it was marked.
    """
    model = models.Slow(agents_end, 0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    began = time.perf_counter()
    with attach(optimizer=optimizer, model=model) as heartbeat:
        for _ in range(3):
            make_step(model, optimizer)
        with heartbeat.phase("evaluation") if marked else nullcontext(), torch.no_grad():
            entered = time.perf_counter()
            model.eval()
            model.seconds = 0.6
            model(torch.randn(4, 8))
            assert models.stage(agents_end) == StepStage.INPUT
            model.seconds = 0.001
            model.train()
            left = time.perf_counter()
        make_step(model, optimizer)
        trained = entered - began + time.perf_counter() - left
        message = agents_end.message()
    assert message.input_seconds is not None
    assert message.input_seconds <= trained
    assert message.last_seconds is not None
    assert message.last_seconds <= trained
    if marked:
        assert message.evaluation_seconds is None
    else:
        assert message.evaluation_seconds is not None
        assert 0.6 <= message.evaluation_seconds <= time.perf_counter() - began


@pytest.mark.filterwarnings("ignore")  # of torch's own
@pytest.mark.parametrize("how", ["returned", "in place", "within"])
def test_compiled(agents_end: AgentsEnd, how: str) -> None:
    """A module that is compiled as one graph stays one, and gives the same results."""
    model = models.Compiled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trained = torch.compile(model, backend="eager", fullgraph=True) if how != "in place" else model
    with attach(optimizer=optimizer, model=trained if how == "returned" else model) as heartbeat:
        if how == "in place":
            model.compile(backend="eager", fullgraph=True)
        for _ in range(3):
            make_step(trained, optimizer)
        assert agents_end.message().step == 3
        assert (models.stage(agents_end) == StepStage.INPUT) == (how != "within")
        assert not heartbeat.closed


def test_what_is_no_model(agents_end: AgentsEnd, caplog: pytest.LogCaptureFixture) -> None:
    """A model that is none is said by the log; steps are told all the same."""
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(optimizer=optimizer, model="model"):
        make_step(model, optimizer)
        assert (agents_end.message().step, models.stage(agents_end)) == (1, StepStage.UNKNOWN)
    assert "step stages unavailable: str is not a torch module" in caplog.text


def test_program_that_is_not_changed(agents_end: AgentsEnd) -> None:
    """Without a call in the script the model is found with the first step."""
    other = torch.nn.Linear(8, 1)
    inner = models.Slow(agents_end)
    outer = torch.nn.Sequential(inner)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.01)
    heartbeat = watch.register()
    try:
        make_step(outer, optimizer)
        assert models.stage(agents_end) == StepStage.UNKNOWN
        make_step(outer, optimizer)
        assert models.stage(agents_end) == StepStage.INPUT
    finally:
        heartbeat.close()
    assert inner.stages == [StepStage.UNKNOWN, StepStage.FORWARD]
    assert "__call__" not in vars(type(other))


def test_program_with_two_models(agents_end: AgentsEnd) -> None:
    """Of two modules that hold the same parameters neither is taken."""
    layer = models.Slow(agents_end)
    both = [torch.nn.Sequential(layer), torch.nn.Sequential(layer)]
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    heartbeat = watch.register()
    try:
        for _ in range(2):
            make_step(both[0], optimizer)
        assert (agents_end.message().step, models.stage(agents_end)) == (2, StepStage.UNKNOWN)
    finally:
        heartbeat.close()


def test_a_rank_that_waits_in_a_hook_has_begun_its_step(agents_end: AgentsEnd) -> None:
    """FSDP 2 waits for parameters in a hook of its own, which it puts first: a rank that hangs
    there is in the forward pass and not before it.
    """
    model = models.Slow(agents_end)
    seen: list[int] = []

    def waits(*_: Any) -> None:
        seen.append(models.stage(agents_end))

    model.register_forward_pre_hook(waits, prepend=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(optimizer=optimizer, model=model):
        make_step(model, optimizer)
        make_step(model, optimizer)
    assert seen == [StepStage.FORWARD] * 2


def test_a_model_stays_what_it_was(agents_end: AgentsEnd) -> None:
    """It is saved as a whole, copied, compiled to TorchScript and traced as without a heartbeat;
    neither what is saved nor another module of its class reports anything.
    """
    model = torch.nn.Sequential(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, after = io.BytesIO(), io.BytesIO()
    with attach(optimizer=optimizer, model=model):
        make_step(model, optimizer)
        torch.save(model, after)
        copied = copy.deepcopy(model)
        graph = str(torch.fx.symbolic_trace(torch.nn.Sequential(model)).graph)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that TorchScript is on its way out
            assert torch.equal(torch.jit.script(model)(torch.ones(8)), model(torch.ones(8)))
        make_step(model, optimizer)
        for other in (copied, torch.nn.Sequential(torch.nn.Linear(8, 1))):
            other(torch.ones(8))
            assert models.stage(agents_end) == StepStage.INPUT
    torch.save(copied, before)
    assert before.getvalue() == after.getvalue()
    assert graph == str(torch.fx.symbolic_trace(torch.nn.Sequential(model)).graph)
