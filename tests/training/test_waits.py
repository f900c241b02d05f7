"""Waits for other ranks: where they are seen, and that nothing of it reaches the training."""

from __future__ import annotations

import _thread
import contextlib
import datetime as dt
import io
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dshealthd.jobs.hangs import states
from dshealthd.training import attach, step_timer, waits
from dshealthd.training import heartbeat as heartbeats
from dshealthd.training.heartbeat import Heartbeat
from dshealthd.training.message import Message, WaitSource
from tests.training.agents_end import AgentsEnd
from tests.training.lazy import Lazy
from tests.training.test_step_timer import Device, Event
from tests.waiting import until

torch: Any = Lazy("torch")

SECONDS = 0.03
"""How long a wait takes here, at least."""


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make this process the only rank of a job."""
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every operation take a while, as if another rank were late."""
    original = torch._C._distributed_c10d.Work.wait

    def wait(*arguments: Any, **named: Any) -> Any:
        time.sleep(SECONDS)
        return original(*arguments, **named)

    monkeypatch.setattr(torch._C._distributed_c10d.Work, "wait", wait)


def train(end: AgentsEnd, meet: Callable[[], object], model: Any = None) -> Message:
    """Make some steps with a wait in each, and return what is told."""
    model = model or torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(optimizer=optimizer, model=model):
        for _ in range(5):
            model(torch.randn(2, 4)).square().mean().backward()
            meet()
            optimizer.step()
        return end.message()


def coalesced() -> None:
    """Make two operations as one."""
    with torch.distributed._coalescing_manager():
        torch.distributed.all_reduce(torch.ones(2))
        torch.distributed.all_reduce(torch.ones(2))


WAYS: dict[str, Callable[[], object]] = {
    "synchronous": lambda: torch.distributed.all_reduce(torch.ones(2)),
    "asynchronous": lambda: torch.distributed.all_reduce(torch.ones(2), async_op=True).wait(),
    "barrier": lambda: torch.distributed.barrier(async_op=False),
    "coalesced": coalesced,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("late")
def test_ways_to_wait(agents_end: AgentsEnd, way: str) -> None:
    """Each way of c10d to block is seen, and the rest of the step is own work."""
    message = train(agents_end, WAYS[way])
    assert message.wait_seconds is not None
    assert message.work_seconds is not None
    assert message.mean_seconds is not None
    assert message.wait_seconds >= SECONDS
    assert message.wait_source is WaitSource.HOST


def test_functional_collectives(agents_end: AgentsEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tensor parallelism waits for is seen where Python waits for it."""
    import torch.distributed._functional_collectives as functional

    original = functional.wait_tensor

    def wait(tensor: Any) -> Any:
        time.sleep(SECONDS)
        return original(tensor)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(functional, "wait_tensor", wait)
    world = torch.distributed.group.WORLD
    message = train(agents_end, lambda: functional.all_reduce(torch.ones(2), "sum", world) + 1)
    assert message.wait_seconds is not None
    assert message.wait_seconds >= SECONDS


@pytest.mark.parametrize(
    ("way", "operation", "share"),
    [
        ("synchronous", "all_reduce", math.inf),
        ("coalesced", "all_reduce", math.inf),
        ("barrier", "barrier", math.inf),
        ("barrier", "barrier", 0.0),
    ],
)
def test_collectives_between_two_steps(
    agents_end: AgentsEnd, monkeypatch: pytest.MonkeyPatch, way: str, operation: str, share: float
) -> None:
    """While the host waits for others between two steps, the page says in which collective; within
    one, nothing is done at all where that is not measured.
    """
    monkeypatch.setattr(step_timer, "SHARE", share)
    told = []
    original = torch._C._distributed_c10d.Work.wait

    def wait(*arguments: Any, **named: Any) -> Any:
        told.append(agents_end.message().collective)
        return original(*arguments, **named)

    monkeypatch.setattr(torch._C._distributed_c10d.Work, "wait", wait)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(optimizer=optimizer, model=model) as heartbeat:
        for _ in range(20):
            loss = model(torch.randn(2, 4)).square().mean()
            WAYS["synchronous"]()
            assert told.pop() == (0, 0)
            loss.backward()
            optimizer.step()
        assert heartbeat.measures is (share > 0)
        for number in (1, 2, 0xFFFF, 0):  # it has sixteen bits
            heartbeat._waits = (number - 1) & 0xFFFF
            WAYS[way]()
            kind, count = told.pop()
            assert (states.operation(kind), count) == (operation, number)
            assert agents_end.message().collective == (0, number)


def test_the_group_of_a_collective_between_two_steps(
    agents_end: AgentsEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page says in which group of all ranks the host waits: one rank may call the same
    collective of two groups in the other order.
    """
    told = []
    original = torch._C._distributed_c10d.Work.wait

    def wait(*arguments: Any, **named: Any) -> Any:
        told.append(states.operation(agents_end.message().collective[0]))
        return original(*arguments, **named)

    monkeypatch.setattr(torch._C._distributed_c10d.Work, "wait", wait)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    first, second = torch.distributed.new_group(), torch.distributed.new_group()
    with attach(optimizer=optimizer, model=model):
        model(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()
        told.clear()
        for group in (first, second, None):
            torch.distributed.all_reduce(torch.ones(2), group=group)
        torch.distributed.barrier(group=first)
        # Whose work a program of its own waits for is not known.
        group = first
        torch.distributed.all_reduce(torch.ones(2), group=group, async_op=True).wait()
    reduced, other, default, barrier, unknown = told
    assert reduced.startswith("all_reduce in group ")
    assert barrier == reduced.replace("all_reduce", "barrier")
    assert other != reduced
    assert other.startswith("all_reduce in group ")
    assert default == unknown == "all_reduce"


def test_a_group_of_some_ranks_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank waits in a group of its own where a job is parallel in two dimensions."""
    world = SimpleNamespace(size=lambda: 4)
    c10d = SimpleNamespace(GroupMember=SimpleNamespace(WORLD=world))
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", c10d)

    def marked(size: int) -> int:
        waited = SimpleNamespace(group_name="3", size=lambda: size)
        caller: Any = SimpleNamespace(f_globals=vars(c10d), f_locals={"group": waited})
        return waits.group(caller)

    assert marked(4) > 0
    assert marked(2) == 0


def test_backward_of_distributed_data_parallel(agents_end: AgentsEnd) -> None:
    """The reducer's wait at the end of the pass, in C++, is seen; computing gradients is own
    work.
    """
    computed: list[float] = []

    # torch is imported where it is installed
    class Reducing(torch.autograd.Function):  # type: ignore[misc]
        """The identity, whose gradient takes a while."""

        @staticmethod
        def forward(_context: Any, batch: Any) -> Any:
            return batch.clone()

        @staticmethod
        def backward(_context: Any, gradient: Any) -> Any:
            began = time.monotonic()
            time.sleep(SECONDS)
            computed.append(time.monotonic() - began)
            return gradient

    class Model(torch.nn.Module):  # type: ignore[misc]
        """Its output is a dictionary, as transformers have it."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, batch: Any) -> Any:
            return {"logits": (Reducing.apply(self.layer(batch)), None)}

    model = torch.nn.parallel.DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    most: list[float] = []
    with attach(optimizer=optimizer, model=model):
        for _ in range(5):
            loss = model(torch.randn(2, 4))["logits"][0].square().mean()
            began = time.monotonic()
            loss.backward()
            optimizer.step()
            most.append(time.monotonic() - began - computed[-1])
        message = agents_end.message()
    assert message.wait_seconds is not None
    assert message.work_seconds is not None
    assert message.work_seconds >= SECONDS
    assert message.wait_seconds <= max(most)


def test_a_result_that_is_kept_gathers_nothing(agents_end: AgentsEnd) -> None:
    """A program may return the same tensor again and again: a parameter, as CLIP its temperature,
    or a part of the graph. It can be saved without a warning, and is as before in the end.
    """

    class Model(torch.nn.Module):  # type: ignore[misc]
        """A model that returns a parameter, and what it has computed of it once."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
            self.temperature = torch.nn.Parameter(torch.ones(1))
            self.kept = [self.temperature * 2]

        def forward(self, batch: Any) -> Any:
            return self.layer(batch), self.temperature, *self.kept

    model = torch.nn.parallel.DistributedDataParallel(Model())
    kept = model.module.kept[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(optimizer=optimizer, model=model) as heartbeat:
        for _ in range(5):
            output, temperature, _ = model(torch.randn(2, 4))
            (output.sum() * temperature).sum().backward()
            optimizer.step()
        assert not model.module.temperature._backward_hooks
        assert len(kept._backward_hooks) == 1
        torch.save(kept, io.BytesIO())
        assert agents_end.message().wait_seconds is not None
        assert not heartbeat.closed
    assert not kept._backward_hooks


def test_a_wait_that_nothing_in_python_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback of C++, or a thread that begins with it, waits as without a heartbeat."""
    failed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: failed.append(told.exc_value))
    work = torch.distributed.all_reduce(torch.ones(2), async_op=True)
    with contextlib.closing(Heartbeat()) as heartbeat:
        heartbeat.parameters = lambda: iter([torch.ones(1)])
        heartbeat.forward_began(torch.nn.Linear(1, 1))
        heartbeat.step()
        # As if the thread below were the one that trains.
        monkeypatch.setattr(heartbeats, "threading", SimpleNamespace(get_ident=lambda: 7))
        heartbeat._thread = 7
        _thread.start_new_thread(work.wait, ())
        until(lambda: heartbeat._waits or failed)
        assert (heartbeat._waits, failed, heartbeat.closed) == (1, [], False)


def test_the_place_of_a_rank_that_exchanges(
    agents_end: AgentsEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that sends to another is at a place of the group, and has the work of that place, as
    long as it does so in its steps.
    """
    monkeypatch.setattr(torch._C._distributed_c10d.ProcessGroup, "send", lambda *_: None)
    monkeypatch.setattr(step_timer, "LEAST", 1.0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(optimizer=optimizer, model=model):
        optimizer.step()
        for place in (None, 0, None):
            for _ in range(3):
                model(torch.randn(2, 4)).sum().backward()
                if place is not None:
                    torch.distributed.group.WORLD.send([torch.ones(2)], place, 0)
                optimizer.step()
            assert agents_end.message().pipeline_stage == place


def test_job_without_collectives(agents_end: AgentsEnd) -> None:
    """A job whose waits are not seen has unknown ones, not none."""
    message = train(agents_end, lambda: None)
    assert message.mean_seconds is not None
    assert message.wait_seconds is message.work_seconds is None


@pytest.mark.usefixtures("late")
def test_other_threads(agents_end: AgentsEnd) -> None:
    """A thread that saves a checkpoint waits beside the training, not for it."""

    def beside() -> None:
        thread = threading.Thread(target=WAYS["barrier"])
        thread.start()
        thread.join()

    assert train(agents_end, beside).wait_seconds is None


def test_nothing_stays(agents_end: AgentsEnd) -> None:
    """A closed heartbeat leaves torch as it was, and results, arguments and errors are torch's."""
    c10d = torch._C._distributed_c10d
    wait = c10d.Work.wait
    heartbeats = []

    def meet() -> None:
        heartbeats.append(c10d.Work.wait is not wait)
        work = torch.distributed.all_reduce(torch.ones(2), async_op=True)
        assert work.wait(timeout=dt.timedelta(seconds=30)) is True
        with pytest.raises(TypeError):
            work.wait("an hour")

    train(agents_end, meet)
    assert heartbeats == 5 * [True]
    assert c10d.Work.wait is wait


def test_collectives_after_a_heartbeat() -> None:
    """What is called in place of torch's own functions on a CUDA device is gone, and they are
    methods as before.
    """
    c10d = torch._C._distributed_c10d
    owners = c10d.Work, c10d.ProcessGroup, torch.cuda.Event
    before = [dict(vars(owner)) for owner in owners]
    with contextlib.closing(Heartbeat()) as heartbeat:
        waits.follow(heartbeat, "cuda")
        assert all(given != vars(owner) for given, owner in zip(before, owners, strict=True))
    assert before == [dict(vars(owner)) for owner in owners]
    for way in WAYS.values():
        way()


@pytest.mark.parametrize(("stream", "told"), [(0, 0.030), (7, None)])
def test_waits_on_a_device(
    agents_end: AgentsEnd, monkeypatch: pytest.MonkeyPatch, stream: int, told: float | None
) -> None:
    """On a CUDA device the default stream's wait is timed by events, without waiting for them."""
    device = Device()

    class TimedEvent(Event):
        """An event as `torch.cuda` has it."""

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            super().__init__(device)

        def wait(self, stream: object = None) -> None:
            """Have a stream wait."""

    cuda = SimpleNamespace(
        Event=TimedEvent,
        is_current_stream_capturing=lambda: False,
        is_initialized=lambda: False,
        current_stream=lambda: SimpleNamespace(cuda_stream=stream),
    )
    monkeypatch.setattr("torch.cuda", cuda)
    # They leave an event for an operation that returns before it is awaited.
    monkeypatch.setattr(waits, "OPERATIONS", ())
    heartbeat = Heartbeat()
    heartbeat.parameters = lambda: iter([SimpleNamespace(device=SimpleNamespace(type="cuda"))])
    heartbeat.step()
    device.comes_to(0.0)
    for step in range(6):
        if step % 2:
            torch.distributed.all_reduce(torch.ones(2), async_op=True).wait()
        else:
            TimedEvent(enable_timing=True).wait()
        heartbeat.step()
        marks = (20.0, 50.0, 100.0) if stream == 0 else (100.0,)
        device.comes_to(*(step * 100.0 + at for at in marks))
    message = agents_end.message()
    heartbeat.close()
    assert message.wait_seconds == (None if told is None else pytest.approx(told))
    if told is not None:
        assert message.wait_source is WaitSource.DEVICE


def test_evaluation_of_the_model_within(agents_end: AgentsEnd) -> None:
    """A wrapper's own model, which trainings evaluate alone, is followed as well; where others
    evaluate than the thread that trains, that is beside its work.
    """
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        model.train()
        model(torch.ones(4, 8)).mean().backward()
        optimizer.step()

    def evaluate() -> None:
        model.eval()
        time.sleep(0.1)
        model.module(torch.ones(4, 8))

    with attach(optimizer=optimizer, model=model):
        step()
        for beside in (True, False):
            if beside:
                (thread := threading.Thread(target=evaluate)).start()
                thread.join()
            else:
                evaluate()
            step()
            told = agents_end.message().evaluation_seconds
            assert told is None if beside else told is not None and told >= 0.1


def test_so_many_results_of_a_forward_pass() -> None:
    """Eight of them tell when their backward pass begins."""
    added: list[object] = []
    hooks: Any = SimpleNamespace(undo=lambda: None, add=added.append)
    results = [2 * torch.ones(1, requires_grad=True) for _ in range(9)]
    waits.follow_backward(None, results, hooks)
    assert len(added) == 8


def test_when_collectives_time_out(agents_end: AgentsEnd) -> None:
    """What `init_process_group` was given, or its default, is told; without a group it is
    unknown.
    """
    message = train(agents_end, lambda: None)
    assert message.timeout == torch.distributed.default_pg_timeout.total_seconds()
    assert message.thread == 0  # the main one, which has another number in a container
    group = torch.distributed.GroupMember.WORLD
    longest = SimpleNamespace(options=SimpleNamespace(_timeout=dt.timedelta.max))
    try:
        torch.distributed.GroupMember.WORLD = SimpleNamespace(_get_backend=lambda _: longest)
        assert waits.collective_timeout() == (1 << 32) - 1, "as its word in the page holds"
        torch.distributed.GroupMember.WORLD = None
        assert waits.collective_timeout() == 0
    finally:
        torch.distributed.GroupMember.WORLD = group


def test_which_thread_trains(agents_end: AgentsEnd) -> None:
    """A thread other than the main one is told by its number."""
    told: list[tuple[int, int]] = []

    def other() -> None:
        told.append((train(agents_end, lambda: None).thread, threading.get_native_id()))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    ((thread_told, native),) = told
    assert thread_told == native
