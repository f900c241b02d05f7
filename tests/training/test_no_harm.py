"""What a heartbeat must not do to the training: keep its memory, its exceptions, its threads."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dshealthd.training import attach, watch
from dshealthd.training.heartbeat import Heartbeat
from dshealthd.training.model import find
from tests.training.agents_end import AgentsEnd
from tests.training.lazy import Lazy
from tests.training.test_engine import Engine

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


@pytest.mark.parametrize("handler", [function, Handler(), Handler().method])
def test_exceptions_of_signal_handlers_reach_the_training(
    agents_end: AgentsEnd, handler: Any
) -> None:
    """A signal that comes while the heartbeat works is the training's: its exception passes."""
    heartbeat = Heartbeat()

    class Loss:
        """A loss that takes long to read, and meanwhile a signal comes."""

        @property
        def device(self) -> Any:
            """Return the device."""
            os.kill(os.getpid(), signal.SIGUSR1)
            return SimpleNamespace(type="meta")

        def numel(self) -> int:
            """Return the number of elements."""
            return 1

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
