"""What a heartbeat must not do to the training: keep its memory, its exceptions, its threads."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib
import inspect
import logging
import math
import os
import pickle
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dshealthd.training import attach, step_timer, watch
from dshealthd.training.heartbeat import Heartbeat
from dshealthd.training.model import find
from tests.training.agents_end import AgentsEnd
from tests.training.lazy import Lazy
from tests.training.test_engine import Engine
from tests.training.test_step_timer import Device, Event

torch: Any = Lazy("torch")


@pytest.fixture
def without_garbage_collection() -> Iterator[None]:
    """Nothing that is part of a reference cycle is freed meanwhile."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def train(model: Any, optimizer: Any) -> None:
    """Make two steps; an unchanged program is followed from the first on."""
    for _ in range(2):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.usefixtures("without_garbage_collection")
@pytest.mark.parametrize("attached", [True, False])
def test_a_deleted_model_is_freed_at_once(*, attached: bool) -> None:
    """Its memory, perhaps most of a GPU's, does not wait for a garbage collection."""
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    heartbeat = attach(optimizer=optimizer, model=model) if attached else watch.register()
    try:
        train(model, optimizer)
        assert "__call__" in vars(type(model))
        freed = weakref.ref(model)
        del model, optimizer
        assert freed() is None
    finally:
        heartbeat.close()


def test_a_deleted_engine_is_freed() -> None:
    """The heartbeat of a program, which lasts as long as the process, does not keep an engine."""
    engine = Engine()
    heartbeat = attach(engine)
    engine.step()
    freed = weakref.ref(engine)
    del engine
    gc.collect()
    assert freed() is None
    heartbeat.close()


class Trial:
    """One of the trainings of a program: the class of its model is its own."""

    def __init__(self) -> None:
        self.kind = type("Model", (torch.nn.Linear,), {})
        self.model = self.kind(8, 1)

    def train(self) -> Any:
        """Make two steps of a new optimizer, and return it."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        train(self.model, optimizer)
        return optimizer

    @property
    def followed(self) -> bool:
        """Whether forward passes of the model are seen."""
        return "__call__" in vars(self.kind)


@pytest.mark.parametrize("attached", [True, False])
def test_trainings_one_after_the_other(agents_end: AgentsEnd, *, attached: bool) -> None:
    """A search for hyperparameters, or the folds of a validation: nothing of a training is kept,
    and the steps and stages of the next one are seen as well.
    """
    backward, heartbeat = torch.Tensor.backward, watch.register()
    kept: list[weakref.ref[Any]] = []
    descriptors = set()
    gc.collect()  # descriptors that other tests of this process have left
    try:
        for number in range(1, 6):
            trial = Trial()
            optimizer = trial.train() if not attached else torch.optim.SGD(trial.model.parameters())
            if attached:
                heartbeat = attach(optimizer=optimizer, model=trial.model)
                train(trial.model, optimizer)
            assert trial.followed
            assert not heartbeat.closed
            assert agents_end.messages()[-1].step == (2 if attached else 2 * number)
            descriptors.add(len(os.listdir("/proc/self/fd")) - len(agents_end.pages))
            kept += map(weakref.ref, (optimizer, trial.model, trial.kind))
            del optimizer, trial
        gc.collect()
        assert [each() for each in kept] == [None] * 15
        assert len(descriptors) == 1
    finally:
        heartbeat.close()
    assert torch.Tensor.backward is backward


def test_searches_for_models_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a share of the time, however many optimizers a program makes. A model stays
    followed under another optimizer, and not while another is trained.
    """
    searched: list[int] = []

    def search(optimizer: Any) -> Any:
        searched.append(len(searched))
        return find(optimizer)

    monkeypatch.setattr("dshealthd.training.optimizer.find", search)
    first, second = Trial(), Trial()
    seen = []
    with contextlib.closing(watch.register()) as heartbeat:
        for trial, share in ((first, 1e-6), (first, 1e-6), (second, 1e-6), (second, math.inf)):
            monkeypatch.setattr(step_timer, "SHARE", share)
            trial.train()
            seen.append((first.followed, second.followed, len(searched)))
        assert heartbeat.steps == 8
    assert seen == [(True, False, 1), (True, False, 1), (False, False, 1), (False, True, 2)]


def test_copies_and_pickles_are_as_without_a_heartbeat() -> None:
    """A copied scaler, and a pickled one, scale by themselves. What cloudpickle writes of a class,
    all that is in it, has nothing of ours.
    """
    scaler, engine, trial = torch.amp.GradScaler("cpu", init_scale=8.0), Engine(), Trial()
    optimizer = torch.optim.SGD(trial.model.parameters(), lr=0.1)
    signature = inspect.signature(trial.model)
    called = vars(torch.nn.Module)["__call__"]
    methods = {name: vars(Engine)[name] for name in ("step", "backward", "save_checkpoint")}
    with attach(engine):
        assert copy.deepcopy(engine).step() == "stepped"
        for name, method in methods.items():
            place = vars(Engine)[name]
            assert place is not method
            assert pickle.loads(pickle.dumps(place)) is method
            assert getattr(Engine, name) is method
    assert methods.items() <= vars(Engine).items()
    with attach(optimizer=optimizer, model=trial.model, scaler=scaler):
        assert pickle.loads(pickle.dumps(vars(trial.kind)["__call__"])) is called
        assert trial.kind.__call__ is called
        assert inspect.signature(trial.model) == signature
        for other in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
            other.scale(trial.model(torch.ones(1, 8)).sum() * math.inf).backward()
            other.step(optimizer)
            other.update()
            assert (other.get_scale(), scaler.get_scale()) == (4.0, 8.0)


def test_what_the_program_wraps_meanwhile() -> None:
    """It stays, and what a heartbeat could not take out from under it is not wrapped again."""
    trial, backward = Trial(), torch.Tensor.backward
    for _ in range(3):
        with pytest.MonkeyPatch.context() as patched, contextlib.closing(watch.register()):
            trial.train()
            ours, place = torch.Tensor.backward, vars(trial.kind)["__call__"]
            patched.setattr(torch.Tensor, "backward", functools.partialmethod(ours))
            patched.setattr(trial.kind, "__call__", functools.partialmethod(place))
        assert (torch.Tensor.backward, vars(trial.kind)["__call__"]) == (ours, place)
        assert (ours.__wrapped__, place.own) == (backward, None)
    torch.Tensor.backward = backward


def test_a_class_that_does_not_let_us_go(agents_end: AgentsEnd) -> None:
    """A heartbeat that cannot be taken out of a class of the program does not fail; all else goes
    back, and nothing is told any more.
    """

    class Sealed(type):
        """The type of classes that keep all that they have."""

        def __delattr__(cls, name: str) -> None:
            raise TypeError(name)

    trial, backward = Trial(), torch.Tensor.backward
    trial.kind = Sealed("Model", (torch.nn.Linear,), {})
    trial.model = trial.kind(8, 1)
    with contextlib.closing(watch.register()):
        trial.train()
        assert agents_end.message().step == 2
    assert torch.Tensor.backward is backward
    trial.train()
    assert agents_end.message().step == 2


@pytest.mark.usefixtures("without_garbage_collection")
def test_an_error_keeps_nothing_alive() -> None:
    """What our code was given as it failed, such as a model, is freed when its program lets go."""

    class Model:
        """Something that is no model."""

        def parameters(self) -> Any:
            """Fail."""
            raise NotImplementedError

    model = Model()
    with contextlib.closing(Heartbeat()) as heartbeat:
        heartbeat.forward_began(model)
        assert heartbeat.closed
        freed = weakref.ref(model)
        del model
        assert freed() is None


class Unwilling(logging.Handler):
    """A program's handler of its log, for which a warning is an error."""

    def emit(self, record: logging.LogRecord) -> None:
        """Raise."""
        raise RuntimeError(record.getMessage())


def test_a_log_that_raises() -> None:
    """The exception is not the training's, and the heartbeat has ended."""
    log, handler = logging.getLogger("dshealthd.training"), Unwilling()
    heartbeat = Heartbeat()
    log.addHandler(handler)
    try:
        heartbeat.step(-5)
    finally:
        log.removeHandler(handler)
    assert heartbeat.closed


def test_a_graph_that_is_captured(agents_end: AgentsEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """No event is recorded or asked for meanwhile, also none from before it, and nothing is copied
    from the device: any of it would fail the capture. The step in which it was is not timed.
    """
    device = Device()
    memory = {"current": 1, "peak": 1}
    cuda = SimpleNamespace(
        Event=device.Event,
        is_initialized=lambda: True,
        is_current_stream_capturing=lambda: device.capturing,
        current_stream=lambda: SimpleNamespace(cuda_stream=0),
        memory_stats_as_nested_dict=lambda: {
            "allocated_bytes": {"all": memory},
            "reserved_bytes": {"all": memory},
        },
    )
    monkeypatch.setattr("torch.cuda", cuda)
    parameter = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    model = SimpleNamespace(parameters=lambda: iter([parameter]))
    with contextlib.closing(Heartbeat()) as heartbeat:
        heartbeat._norm._event = event = Event(device)
        heartbeat.communication = lambda: float(event.query())

        def step() -> None:
            heartbeat._norm._pending = True
            heartbeat.forward_began(model)
            heartbeat.forward_ended()
            heartbeat.gradient_norm(1.0)
            mark = heartbeat.wait_began()
            if mark is not None:
                heartbeat.wait_ended(mark)
            heartbeat._due = 0.0
            heartbeat.step()

        step()
        step()
        device.capturing = True
        recorded = len(device.events)
        step()
        heartbeat.enter("evaluation")
        heartbeat.evaluated()
        assert len(device.events) == recorded
        device.capturing = False
        step()
        device.comes_to(*(1000.0 * number for number in range(len(device.events))))
        step()
        assert not heartbeat.closed
        message, inputs = agents_end.message(), heartbeat._step_timer.input
    assert message.totals is not None
    assert (message.step, message.totals.steps, inputs._count) == (4, 1, 1)


class Preempted(Exception):
    """What a program's signal handler raises."""


class Handler:
    """A signal handler that is an object."""

    def __call__(self, *_: object) -> None:
        """Raise what the training expects."""
        raise Preempted

    method = __call__


def function(*_: object) -> None:
    """Raise what the training expects."""
    raise Preempted


def function_of_one_signal(number: int, _frame: object) -> None:
    """Raise once: the next signal ends the process."""
    signal.signal(number, signal.SIG_DFL)
    raise Preempted


HANDLERS = (
    *(function, Handler(), Handler().method, function_of_one_signal),
    functools.partial(Handler.method, Handler()),
)


@pytest.mark.parametrize("handler", HANDLERS)
def test_exceptions_of_signal_handlers_reach_the_training(
    agents_end: AgentsEnd, handler: Any
) -> None:
    """A signal that comes while the heartbeat works is the training's: its exception passes."""
    heartbeat = Heartbeat()

    class Loss(float):
        """A loss that takes long to read, and meanwhile a signal comes."""

        def __float__(self) -> float:
            """Return the value."""
            os.kill(os.getpid(), signal.SIGUSR1)
            return 1.0

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(Preempted):
            heartbeat.loss(Loss())
        heartbeat.step()
        assert agents_end.message().step == 1
    finally:
        signal.signal(signal.SIGUSR1, before)
        heartbeat.close()


def test_other_imports_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import in another thread asks every other finder, while the hook is removed too."""
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    others = sys.meta_path.copy()
    hook = watch.OptimizerImportHook()
    sys.meta_path.insert(0, hook)
    finders = iter(sys.meta_path)
    assert next(finders) is hook
    assert hook.find_spec("json", None) is None
    assert hook in sys.meta_path, "another module than torch's"
    hook.remove()
    assert list(finders) == others
    assert sys.meta_path == others
    # Where there is no torch, that is what the program is told.
    monkeypatch.setattr(watch, "MODULE", "no_such_module")
    assert hook.find_spec("no_such_module", None) is None


@pytest.mark.parametrize("typed", [False, True])
def test_a_module_that_was_waited_for_is_as_any_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, typed: bool
) -> None:
    """What is registered as it is imported is registered once, also where it is loaded again, but
    not in a notebook.
    """
    if typed:
        monkeypatch.setattr("builtins.__IPYTHON__", True, raising=False)
    (tmp_path / "optimizers.py").touch()
    registered: list[int] = []
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [watch.OptimizerImportHook(), *sys.meta_path])
    monkeypatch.setattr(watch, "MODULE", "optimizers")
    monkeypatch.setattr(watch, "register", lambda: registered.append(1))
    module = importlib.import_module("optimizers")
    assert module.__spec__ is not None
    assert "exec_module" not in vars(module.__spec__.loader)
    importlib.reload(module)
    watch.start()
    assert registered == ([] if typed else [1, 1])
    del sys.modules["optimizers"]


def test_search_for_the_model_leaves_other_threads_alone() -> None:
    """A thread that fills tuples meanwhile goes on (a SystemError if others refer to its tuple)."""
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begun, ends, failures = threading.Event(), threading.Event(), []

    def item(number: int) -> list[int]:
        begun.set()
        return [number]

    def fill() -> None:
        while not ends.is_set():
            try:
                tuple(item(number) for number in range(1000))
            except SystemError as error:
                failures.append(error)

    thread = threading.Thread(target=fill)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        begun.wait()
        assert all(find(optimizer) is model for _ in range(10))
    finally:
        ends.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not failures
