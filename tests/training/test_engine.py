"""A DeepSpeed engine: what is called through, and what is read of it; a real one trains
elsewhere.
"""

from __future__ import annotations

import copy
import inspect
import sys
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dshealthd.training import attach
from dshealthd.training.engine import Communication
from dshealthd.training.message import Phase, StepStage
from dshealthd.training.saved import SIZE, Saved
from tests.training.agents_end import AgentsEnd


class Engine:
    """What of a DeepSpeed engine is used; two micro-steps a step."""

    def __init__(self) -> None:
        self.global_steps = 40
        self.skipped_steps = 3
        self.micro_steps = 0
        self.optimizer = SimpleNamespace(cur_scale=65536.0)
        self.training = True
        self.during_checkpoint: Callable[[], object] = lambda: None

    def fp16_enabled(self) -> bool:
        """Return whether there is a loss scale."""
        return True

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step."""
        return None if self.global_steps == 40 else 0.5

    def backward(self, loss: float, scale: int = 1) -> float:
        """Return the loss, scaled."""
        return loss / scale

    def step(self) -> str:
        """Make a micro-step."""
        time.sleep(0.012)
        self.micro_steps += 1
        self.global_steps += self.micro_steps % 2 == 0
        return "stepped"

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: object = None,  # noqa: ARG002
        save_latest: bool = True,  # noqa: ARG002, FBT001, FBT002 - as DeepSpeed has it
    ) -> str:
        """Fail on a full disk."""
        self.during_checkpoint()
        if save_dir == "/full":
            raise OSError(28, "No space left on device", save_dir)
        return f"{save_dir}/{tag}"

    def train(self, mode: bool = True) -> Engine:  # noqa: FBT001, FBT002 - as torch has it
        """Set the mode."""
        self.training = mode
        return self

    def eval(self) -> Engine:
        """Set the other mode."""
        self.training = False
        return self


def test_steps_of_an_engine(agents_end: AgentsEnd) -> None:
    """A step is the engine's own count, which goes on from a checkpoint."""
    engine = Engine()
    with attach(engine):
        for step in (40, 41, 41, 42):
            before = time.monotonic()
            assert engine.backward(2.0, scale=2) == 1.0
            assert engine.step() == "stepped"
            assert agents_end.message().step == step
            assert agents_end.message().sent > before
    last = agents_end.message()
    assert (last.skipped, last.loss_scale) == (3, 65536.0)
    assert (last.gradient_norm, last.loss_finite) == (0.5, True)
    assert last.last_seconds is not None
    assert last.last_seconds >= 0.024
    assert not {"step", "backward", "train", "eval", "save_checkpoint"} & vars(engine).keys()


def test_checkpoint_and_evaluation_are_phases(agents_end: AgentsEnd) -> None:
    """Checkpoints and evaluation are marked, the engine's own errors come through, and its
    results.
    """
    engine = Engine()
    engine.during_checkpoint = lambda: phases.append(agents_end.message().phase)
    phases: list[int] = []
    with attach(engine):
        with pytest.raises(OSError, match="No space left"):
            engine.save_checkpoint("/full")
        phases.append(agents_end.message().phase)
        assert engine.eval() is engine
        phases.append(agents_end.message().phase)
        assert engine.train() is engine
        phases.append(agents_end.message().phase)
    assert phases == [Phase.CHECKPOINT, Phase.TRAINING, Phase.EVALUATION, Phase.TRAINING]


def test_a_completed_save_says_where(
    agents_end: AgentsEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where, how often and with how many files of optimizers; not of a save that fails."""
    engine: Any = Engine()
    monkeypatch.chdir("/tmp")
    with attach(engine):
        engine.step()
        with pytest.raises(OSError, match="No space left"):
            engine.save_checkpoint("/full")
        assert agents_end.saved() is None
        assert engine.save_checkpoint(tag="a", save_dir="runs/7") == "runs/7/a"
        assert agents_end.saved() == Saved("/tmp/runs/7", 1)
        engine.mp_world_size = 3
        engine.optimizer.dp_process_group = "group"
        engine.use_node_local_storage = lambda: True
        torch = SimpleNamespace(distributed=SimpleNamespace(get_world_size={"group": 4}.get))
        monkeypatch.setitem(sys.modules, "torch", torch)
        assert engine.save_checkpoint("/runs", "b") == "/runs/b"
        assert agents_end.saved() == Saved("/runs", 2, 12, is_node_local=True)
        engine.has_moe_layers = True
        engine.save_checkpoint("/runs", "c")
        assert agents_end.saved() == Saved("/runs", 3, None, is_node_local=True)
        engine.save_checkpoint("/other", save_latest=False)
        engine.save_checkpoint("/" + "x" * SIZE)
        assert agents_end.saved() == Saved("/runs", 3, None, is_node_local=True)
        assert agents_end.message().phase == Phase.TRAINING


def test_methods_that_the_program_has_replaced(agents_end: AgentsEnd) -> None:
    """They are called, and are there again in the end; a copy of the engine has them as well."""
    engine: Any = Engine()
    stepped, calls = engine.step, []

    def step() -> str:
        calls.append(engine.global_steps)
        return f"{stepped()} twice"

    engine.step = step
    with attach(engine):
        assert [engine.step() for _ in range(2)] == ["stepped twice"] * 2
        assert agents_end.message().step == 41
        assert copy.deepcopy(engine).step is step
        assert inspect.signature(engine.step) == inspect.signature(step)
        assert calls == [40, 40]
    assert engine.step is step


class Timers:
    """DeepSpeed's timers of operations: durations in seconds, one a call."""

    def __init__(self) -> None:
        self.timers = {"all_reduce": SimpleNamespace(event_timers=[0.25, 0.5])}

    def get_timers(self) -> dict[str, Any]:
        """Return the timers by name."""
        return self.timers


@pytest.fixture
def comm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """DeepSpeed's module of collectives, with its logger on."""
    module: Any = ModuleType("deepspeed.comm.comm")
    module.comms_logger = SimpleNamespace(enabled=True)
    module.timers = Timers()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_communication_is_summed_once(comm: Any) -> None:
    """Each call counts once, also when DeepSpeed resets its timers."""
    communication = Communication()
    assert communication() == 0.75
    events = comm.timers.timers["all_reduce"].event_timers
    events.append(1.0)
    assert communication() == 1.75
    events.clear()
    events.append(0.125)
    assert communication() == 1.875
    assert communication() == 1.875


def test_communication_waits_for_no_device(comm: Any) -> None:
    """A timing whose end the device has not come to is left for later, and so is what follows
    it.
    """
    done = {"value": False}
    end = SimpleNamespace(query=lambda: done["value"])
    start = SimpleNamespace(elapsed_time=lambda _end: 500.0)
    comm.timers.timers["all_reduce"].event_timers = [
        1.0,
        SimpleNamespace(start_event=start, end_event=end),
    ]
    communication = Communication()
    assert communication() == 1.0
    done["value"] = True
    assert communication() == 1.5


def test_communication_that_is_not_measured(comm: Any) -> None:
    """With the logger off, or without DeepSpeed, the time is unknown and not 0."""
    comm.comms_logger.enabled = False
    assert Communication()() is None


class LoadMicroBatch:
    """An instruction, by its name in DeepSpeed."""


class ForwardPass:
    """Another one."""


class RecvGrad:
    """One for which a rank waits for another stage."""


class PipelineEngine(Engine):
    """What of a pipeline's engine is used."""

    stage_id = 2

    def __init__(self, agents_end: AgentsEnd) -> None:
        super().__init__()
        self.agents_end = agents_end
        self.module = SimpleNamespace(
            training=True,
            parameters=lambda: iter([SimpleNamespace(device=SimpleNamespace(type="cpu"))]),
        )
        self.stages: list[tuple[str, int]] = []

    def instruct(self, buffer_id: int) -> int:
        """Carry one instruction out, and look at what is told meanwhile."""
        self.stages.append((self.instruction.__name__, self.agents_end.message().stage))
        return buffer_id

    _INSTRUCTION_MAP = dict.fromkeys((LoadMicroBatch, ForwardPass, RecvGrad), instruct)

    def train_batch(self) -> float:
        """Make a step of two micro-batches."""
        for instruction in 2 * (LoadMicroBatch, ForwardPass, RecvGrad):
            self.instruction = instruction
            assert self._INSTRUCTION_MAP[instruction](self, buffer_id=7) == 7
        self.global_steps += 1
        return 0.5


def test_stages_of_a_pipeline(agents_end: AgentsEnd) -> None:
    """Loading is input, computing is forward, and whoever waits for another stage is as far as it
    can be: a loader that stalls leaves its rank behind.
    """
    pytest.importorskip("torch")
    engine = PipelineEngine(agents_end)
    with attach(engine) as heartbeat:
        heartbeat.enter("other")
        engine.train_batch()
        engine.module.training = False
        engine.train_batch()
        message = agents_end.message()
    step = [
        ("LoadMicroBatch", StepStage.INPUT),
        ("ForwardPass", StepStage.FORWARD),
        ("RecvGrad", StepStage.BACKWARD),
    ]
    assert engine.stages[:6] == step + step
    assert {stage for _, stage in engine.stages[6:]} == {StepStage.INPUT}  # an evaluation has none
    assert (message.pipeline_stage, message.step) == (2, 42)
    assert "_INSTRUCTION_MAP" not in vars(engine)
