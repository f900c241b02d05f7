"""The heartbeat of one training process. If it fails, the training goes on."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import math
import operator
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from time import monotonic
from typing import Any, TypeVar

from dshealthd.training import report, waits
from dshealthd.training.installed import Installed
from dshealthd.training.message import (
    GROUP_BIT,
    MAX_COUNT,
    MAX_PASSES,
    PASS_BIT,
    STEP_BIT,
    DeviceMemory,
    Message,
    Phase,
    WaitSource,
    encode,
)
from dshealthd.training.page import Page
from dshealthd.training.position import BACKWARD, FORWARD, INPUT, Position
from dshealthd.training.readback import Readback
from dshealthd.training.saved import Saved
from dshealthd.training.saved import encode as encode_saved
from dshealthd.training.step_timer import Average, StepTimer

log = logging.getLogger("dshealthd.training")

SLOW_INTERVAL = 1.0
"""Seconds after which a message is due, and memory and communication time, which cost more to
read."""
ALIKE = 10
"""Steps with equally many forward passes from which on the next one is expected to have as many."""

_VARARGS = 4  # `inspect.CO_VARARGS`, without an import that each process would pay for

Method = TypeVar("Method", bound=Callable[..., Any])

_newest: list[weakref.ref[Heartbeat]] = []
"""The one heartbeat of this process; none before the first."""


def _current() -> Heartbeat | None:
    return _newest[0]() if _newest else None


def _replace_current(heartbeat: Heartbeat) -> None:
    before = _current()
    if before is not None:
        before.end_for_next()
    _newest[:] = [weakref.ref(heartbeat)]


def _forked() -> None:
    heartbeat = _current()
    if heartbeat is not None:
        heartbeat.restart()


os.register_at_fork(after_in_child=_forked)


def reports() -> bool:
    """Return whether this process has a heartbeat, or one that has ended."""
    return _current() is not None


def step_count(steps: int) -> int:
    """Return a number of steps that fits the position; TypeError or ValueError if it is none. What
    stores the position has no handler of exceptions, for its cost.
    """
    steps = operator.index(steps)
    if not 0 <= steps <= MAX_COUNT:
        raise ValueError(f"{steps} steps")
    return steps


def never_raise(method: Method) -> Method:
    """Keep the exceptions of a heartbeat, the first argument, away from the training.

    The first exception is logged and ends the heartbeat. One that a signal handler of the training
    raises meanwhile is the training's.

    Nothing is done while a CUDA graph is captured: to record an event, or to ask for one, would
    become a part of the graph, or fail the capture.
    """

    @functools.wraps(method)
    def call(heartbeat: Heartbeat, *arguments: Any, **named: Any) -> Any:
        if heartbeat.closed:
            return None
        try:
            return None if heartbeat.captures() else method(heartbeat, *arguments, **named)
        except Exception as error:
            # Neither our bugs nor a new torch or DeepSpeed may end a training job.
            if _is_signal_handlers(error):
                raise
            heartbeat.give_up()
            return None

    return call  # type: ignore[return-value] # the same signature


def _is_signal_handlers(error: Exception) -> bool:
    """Return whether a handler of a signal raised an exception: a preemption, a time limit.

    Whatever is registered by then, a handler is a function that is given the frame from which it is
    called: the one that the signal interrupted.
    """
    # Without the first frame, of the guard: what it has, this exception too, would refer to itself.
    entry = error.__traceback__
    for frame, _line in traceback.walk_tb(entry and entry.tb_next):
        code = frame.f_code
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & _VARARGS)
        names = code.co_varnames[:count]
        for value in map(frame.f_locals.get, names) if names else ():
            for part in value if type(value) is tuple else (value,):
                if part is not None and part is frame.f_back:
                    return True
    return False


class Heartbeat(Position):
    """A reporter of every step to the agent.

    A process has one: a new one closes the one before, as where a program makes several trainings
    one after the other. It survives fork: the child becomes a sender of its own.

    Each step and each of its stages moves the position, two words of the page. All else is told by
    a message at the end of a step that is measured: of all steps, if they are long enough
    (`step_timer.SHARE`).

    Nothing here waits for a device, the agent or a lock. Values are those of the moment of the
    message, with these exceptions:

    - The stage is that of the host, which launches work and runs ahead of its device. A host that
      waits for results after a step (`loss.item()`) is in the input stage whatever its device does.
    - Times of input, waits and own work are some steps late on a CUDA device
      (`step_timer.StepTimer`).
    - Loss and gradient norm are a step or more late on a CUDA device (`readback.Readback`).
    - Memory and communication time are up to a second old, because reading them costs tens of
      microseconds.
    - The step time runs from the end of one step to the end of the next on the host. If a job never
      waits for its device, steps end when their kernels are launched. Single durations then vary,
      but their mean is right, because launching blocks when the device's queue is full.
    """

    _exchanges: int | None = None
    """Place of this rank in the group in which it has sent or received in this step."""
    _place: int | None = None
    """The same in the last measured step: the stages of a plain pipeline, whose work may differ."""

    def __init__(self, *, step: int = 0, reports: bool = False) -> None:
        """Prepare. `step` counts the steps of earlier runs, `reports` is whether rank 0 prints at
        its exit where its time went.
        """
        _replace_current(self)
        self._page = Page()
        super().__init__(0, *self._page.position)
        self.closed = os.environ.get("DSHEALTHD_HEARTBEAT") == "0"
        self.measures = not self.closed
        self._phase = Phase.TRAINING
        self._step_timer = StepTimer()
        self._counted = 0
        """Steps up to the last measured one."""
        self._finite: bool | None = None
        self._finite_step = self._nonfinite_step = 0
        self._last: float | None = None
        self._mean = Average()
        self._paused = 0.0
        self._pause_began: float | None = None
        self._loss = Readback()
        self._norm = Readback()
        self._memory: DeviceMemory | None = None
        self._communication: float | None = None
        self.installed = Installed()
        self._in_result = self.installed.part()
        self._saves = 0
        self._waits = 0
        """Collectives so far in which the host has waited between two steps."""
        self._alike = 0
        """Steps with the usual forward passes, up to twice ALIKE; another counts as ALIKE fewer."""
        self._thread = 0
        self._entered: Any = None
        self._first: tuple[float, int] | None = None
        """When the first step ended, and its number."""
        self._marked: dict[Phase, float] = {}
        """Seconds in each phase so far but the present one."""
        self._phase_began = 0.0
        self._evaluation, self._evaluated = 0.0, 0.0
        """Seconds of evaluation in no marked phase, and when its last forward pass ended."""
        self.parameters: Callable[[], Iterable[Any]] = list
        """Returns what is trained, which shows the device, and does not keep it alive. It may move
        there after the optimizer was made.
        """
        self.pipeline_stage: int | None = None
        """The stage of the pipeline that this rank computes, as its engine says; None without an
        engine of a pipeline.
        """
        self.skipped: int | None = None
        """Steps skipped so far; None if unknown."""
        self.loss_scale: float | None = None
        self.communication: Callable[[], float | None] | None = None
        """Returns the seconds spent in collectives so far, without waiting."""
        self._continue(step)
        asked = reports or os.environ.get("DSHEALTHD_REPORT") == "1"
        self._reports = asked and not self.closed and report.place()[0] == "0"
        if self._reports:
            self.installed.add(functools.partial(atexit.unregister, atexit.register(self._report)))

    @never_raise
    def _continue(self, steps: int) -> None:
        self.steps = self._counted = step_count(steps)

    def step(self, step: int | None = None) -> None:
        """Report an optimizer step; `attach` does this by itself.

        `step` sets the step count, for a caller that keeps its own.
        """
        steps = self.steps + 1
        if (
            steps > self._brief_until
            or self._passes != self._usual_passes
            or (step is not None and (type(step) is not int or step != steps))
        ):
            self._step(steps if step is None else step)
            return
        self.steps = steps
        self._passes = 0
        if self.stage:
            self.stage = INPUT
        self._words[0] = steps << STEP_BIT | self.stage
        self._times[1] = self._ended = now = monotonic()
        if now >= self._due:
            self._brief_until = 0

    @never_raise
    def _step(self, steps: int) -> None:
        """Report a step of which more is told than its position, or the next is measured."""
        steps = step_count(steps)
        now = monotonic()
        self._counted += steps - self.steps - 1  # which this process has not made
        self.steps = steps
        if self.measures:
            self._place, self._exchanges = self._exchanges, None
        # Inside a pause the duration is unknown: the pause has not ended.
        if self._ended is None:
            self._first = now, steps
        elif self._pause_began is None:
            self._last = max(now - self._ended - self._paused, 0.0)
            self._mean.add(self._last)
        self._ended, self._paused, self._pause_began = now, 0.0, None
        due = self._count_passes() or self.measures or now >= self._due or self._phase
        if self._phase:  # a process that makes steps trains, whatever it marked before
            self._phase_ends(now)
            self._phase = Phase.TRAINING
        if self._thread != threading.get_ident():
            self._describe()
        timer = self._step_timer
        if timer.device is None:
            self._find_device(self.parameters())
        if self.measures:
            counted, self._counted = self._counted, steps
            timer.step_ended(now, steps, steps - counted, self._mean.value)
        measured = timer.next_measured(steps + 1)
        self._brief_until = measured - 2  # at the end of the last one before, measuring begins
        if measured == steps + 1 and not self.measures:
            timer.step_began(now)
        self.measures = measured == steps + 1
        self.move(self.stage and INPUT)
        if due:
            self._write()

    def micro_step(self) -> None:
        """Report a micro-step that does not complete an optimizer step."""
        self.move(self.stage and INPUT)
        if self.measures:
            self._input_began()

    def forward_began(self, model: Any, *, synchronizes: bool = False) -> None:
        """Report that a forward pass of `model` begins.

        `synchronizes` says that it first waits for other ranks, until `synchronized` is called.
        """
        self._passes = passes = self._passes + 1
        self.stage = FORWARD
        self._words[0] = self.steps << STEP_BIT | (passes & MAX_PASSES) << PASS_BIT | FORWARD
        self._times[1] = monotonic()
        if self.measures:
            self._forward_began(model, synchronizes=synchronizes)

    @never_raise
    def _forward_began(self, model: Any, *, synchronizes: bool) -> None:
        now = monotonic()
        if self._step_timer.device is None:
            self._find_device(model.parameters())
        self._write_first()
        self._step_timer.input_ended(now)
        if synchronizes:
            self._entered = self._step_timer.mark(now)

    @never_raise
    def synchronized(self) -> None:
        """Report that the model within a wrapper begins to compute: the ranks have met."""
        self._step_timer.waited(self._entered, monotonic())

    def forward_ended(self, _result: Any = None) -> None:
        """Report that the forward pass has ended."""
        self.stage = BACKWARD
        self._words[0] = self.steps << STEP_BIT | (self._passes & MAX_PASSES) << PASS_BIT | BACKWARD
        self._times[1] = monotonic()

    @never_raise
    def evaluated(self) -> None:
        """Report that a forward pass in evaluation mode has ended.

        Between two steps, the time since the step or the pass before it was no step's. A hang is
        judged as in training all the same: nobody has marked a pause.
        """
        if self.stage != INPUT or self._phase or threading.get_ident() != self._thread:
            return
        now = monotonic()
        seconds = now - max(self._evaluated, self._times[1])
        self._evaluated, self._brief_until = now, 0
        self._evaluation += seconds
        self._paused += seconds
        if self.measures:
            self._step_timer.evaluated(now)
        if now >= self._due:
            self._write()

    @never_raise
    def follow_backward(self, result: Any) -> None:
        """Report the wait at the end of the backward pass from `result`."""
        waits.follow_backward(self, result, self._in_result)

    def load_began(self) -> None:
        """Report that a pipeline loads a micro-batch."""
        self.move(INPUT)
        if self.measures:
            self._input_began()

    @never_raise
    def _input_began(self) -> None:
        self._write_first()
        if self.stage:
            self._step_timer.micro_step_ended(monotonic())

    @never_raise
    def load_ended(self) -> None:
        """Report that a pipeline has loaded a micro-batch."""
        if self.measures:
            self._step_timer.input_ended(monotonic())

    def exchange_began(self) -> None:
        """Report that a rank of a pipeline sends to another stage, or receives from one."""
        if self.stage != BACKWARD:
            self.move(BACKWARD)
            if self.measures:
                self._exchange_began()

    @never_raise
    def _exchange_began(self) -> None:
        self._write_first()
        self._step_timer.input_dropped()

    @never_raise
    def wait_began(self, stream: Any = None) -> Any:
        """Return the mark at which the rank begins to wait for others; None if it does not count.

        `stream` is the CUDA stream that waits, None for the current one. Other streams than the
        default one wait beside the work, and so do other threads than the one that trains.
        """
        device = self._step_timer.device
        if device == "cpu":
            return monotonic() if threading.get_ident() == self._thread else None
        if device != "cuda":
            return None
        current = sys.modules["torch"].cuda.current_stream()
        beside = current.cuda_stream or (stream is not None and stream != current)
        return None if beside else self._step_timer.mark(0.0)

    @never_raise
    def wait_ended(self, mark: Any) -> None:
        """Report the end of a rank's wait for others."""
        self._step_timer.waited(mark, monotonic())

    @never_raise
    def collective_began(self, work: Any = None) -> bool:
        """Report that the host waits in a collective, whose work this is; return whether its end
        counts.

        Only between two steps, where waits are few: within a step, all ranks wait for others.
        """
        if self.stage != INPUT or threading.get_ident() != self._thread:
            return False
        # Who waits: the function of torch's that called ours, behind the guard; None in C code.
        caller = sys._getframe(2).f_back  # noqa: SLF001 - documented
        self._waits = (self._waits + 1) & 0xFFFF
        kind = waits.awaited_operation(work) + 1 | waits.group(caller) << GROUP_BIT
        self._page.wait(kind, self._waits)
        return True

    @never_raise
    def collective_ended(self) -> None:
        """Report that the host waits in no collective any more."""
        self._page.wait(0, self._waits)

    @never_raise
    def exchanged(self, group: Any) -> None:
        """Report that this rank sends to a single other one of a group, or receives from one."""
        self._exchanges = group.rank()

    @never_raise
    def loss(self, loss: Any) -> None:
        """Report the loss, a number or a tensor with one element.

        Only whether it is finite reaches the agent, and only of steps that are measured.
        """
        if self.measures:
            self._loss.offer(loss, monotonic(), self.steps + 1)

    @never_raise
    def gradient_norm(self, norm: Any) -> None:
        """Report the gradient norm, as returned by `torch.nn.utils.clip_grad_norm_`."""
        if self.measures:
            self._norm.offer(norm, monotonic())

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark a block as not training: `evaluation`, `checkpoint`, `compile` or `other`.

        Its time counts neither as a hang nor as step time.
        """
        before = self._phase
        self.enter(name)
        try:
            yield
        finally:
            self.enter(before.name)

    @never_raise
    def enter(self, name: str) -> None:
        """Mark a phase without a with statement; the next step, or `enter("training")`, ends it."""
        phase = getattr(Phase, name.upper(), Phase.OTHER)
        if phase is self._phase:
            return
        now = monotonic()
        if self._phase is Phase.TRAINING:
            self._pause_began = now
            self._step_timer.interrupted()
        elif phase is Phase.TRAINING and self._pause_began is not None:
            self._paused += now - self._pause_began
            self._pause_began = None
        self._phase_ends(now)
        self._phase, self._brief_until = phase, 0
        self._write()

    def _phase_ends(self, now: float) -> None:
        if self._first is not None and self._phase:
            self._marked[self._phase] = (
                self._marked.get(self._phase, 0.0) + now - max(self._phase_began, self._first[0])
            )
        self._phase_began = now

    @never_raise
    def saved(
        self,
        directory: str | os.PathLike[str],
        *,
        optimizer_files: int | None = None,
        node_local: bool = False,
        deepspeed: bool = False,
    ) -> None:
        """Report that a checkpoint was saved in `directory`; `attach(engine)` does this by itself.

        The agent then shows the space that is left there. Of `deepspeed`'s it also checks, with the
        rights of this process's user, that the next one has enough space and that this one is
        complete. A path longer than about 480 bytes is not reported, nor is a relative path whose
        working directory was removed.
        """
        self._saves += 1
        with contextlib.suppress(ValueError, ArithmeticError, OSError):
            place = os.path.abspath(directory)
            self._page.write_note(
                encode_saved(Saved(place, self._saves, optimizer_files, node_local, deepspeed))
            )

    def close(self) -> None:
        """Stop sending heartbeats, and detach from everything that was attached to."""
        self._report()
        self._end()
        try:
            self.installed.undo()
        except Exception as error:
            # A class of the program may not let us.
            if _is_signal_handlers(error):
                raise

    def end_for_next(self) -> None:
        """Close, as another heartbeat takes this one's place."""
        if self._first is None:  # then all its time is within the other's start
            self._reports = False
        self.close()

    @never_raise
    def _report(self) -> None:
        """Print where the time of this rank went, once and if asked."""
        if not self._reports:
            return
        self._reports = False
        now, whole = monotonic(), report.age()
        self._phase_ends(now)
        if self._first is None:
            times, steps = {"start": whole}, 0
        else:
            began, first = self._first
            steps = self.steps - first
            marked = {phase.name.lower(): seconds for phase, seconds in self._marked.items()}
            if self._evaluation:
                marked["evaluation"] = marked.get("evaluation", 0.0) + self._evaluation
            parts = report.divide_time(
                max(now - began - sum(marked.values()), 0.0),
                steps,
                self._step_timer.totals,
                self._step_timer.input.mean,
                alone=report.place()[1] == "1",
            )
            times = {**parts, **marked, "start": max(whole - (now - began), 0.0)}
            steps += 1
        report.show(times, steps, self._memory)

    def captures(self) -> bool:
        """Return whether a CUDA graph is being captured; then the present step is not timed."""
        cuda = getattr(sys.modules.get("torch"), "cuda", None)  # torch may be half imported
        if cuda is None or not cuda.is_initialized():
            return False
        captures: bool = cuda.is_current_stream_capturing()
        if captures:
            self._step_timer.interrupted()
        return captures

    def give_up(self) -> None:
        """End the heartbeat because of the exception being handled, and log it.

        As text: a log may keep what it is given, and an exception has all that is on its stack.
        """
        self._end()
        try:
            log.warning(
                "heartbeat stopped after an error; training goes on\n%s", traceback.format_exc()
            )
        except Exception as error:
            # The program's handlers of its log may raise.
            if _is_signal_handlers(error):
                raise

    def _end(self) -> None:
        self.closed, self.measures = True, False
        self.restart()  # else the agent would go on reading stale values

    def restart(self) -> None:
        """Report as another process: a forked child has its parent's page, and must not write
        there.
        """
        self._page.close()
        self._words, self._times = self._page.position
        self._thread, self._brief_until, self._due = 0, 0, 0.0

    def __enter__(self) -> Heartbeat:  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find_device(self, parameters: Iterable[Any]) -> None:
        """Start measuring, and following waits, on the device of what is trained."""
        torch = sys.modules.get("torch")
        parameter = next(iter(parameters), None)
        if torch is None or parameter is None:
            return
        self._step_timer.on(parameter.device.type, torch.cuda)
        waits.follow(self, parameter.device.type)

    def _describe(self) -> None:
        """Say which thread trains, which is this one, and when its collectives time out."""
        self._thread = threading.get_ident()
        main = self._thread == threading.main_thread().ident
        self._page.describe(0 if main else threading.get_native_id(), waits.collective_timeout())

    def _count_passes(self) -> bool:
        """Learn at the end of a step how many forward passes are usual; return whether that
        changed.

        A single step may have fewer at the end of an epoch, or one more for a log.
        """
        before = self._forward_passes()
        if self._passes == self._usual_passes:
            self._alike = min(self._alike + 1, 2 * ALIKE)
        elif self._alike >= ALIKE:
            self._alike -= ALIKE
        else:
            self._usual_passes, self._alike = self._passes, 0
        self._passes = 0
        return self._forward_passes() != before

    @property
    def _role(self) -> int | None:
        return self._place if self.pipeline_stage is None else self.pipeline_stage

    def _forward_passes(self) -> int:
        """Return how many forward passes are usual in a step.

        0 in a pipeline, whose stages are at different micro-batches by design, and in a training
        whose steps have now more and now fewer: there the numbers of two ranks say nothing.
        """
        return 0 if self._role is not None or self._alike < ALIKE else self._usual_passes

    def _write_first(self) -> None:
        """Write the heartbeat's first message: a rank may hang before its first step ends."""
        if not self._thread:
            self._describe()
            self._write()

    def _write(self) -> None:
        """Write a heartbeat's message; how far the process is says the position."""
        if not self._page.is_open:
            self._page.open()
            self._words, self._times = self._page.position
        now = self.move(self.stage)
        loss = self._loss.poll()
        if loss is not None:
            was, self._finite = self._finite, math.isfinite(loss)
            if self._finite:
                self._finite_step = self._loss.step
            elif was is not False:
                self._nonfinite_step = self._loss.step
        if now >= self._due:
            self._due = now + SLOW_INTERVAL
            self._memory = _memory()
            if self.communication is not None:
                self._communication = self.communication()
        self._norm.poll()
        message = Message(
            step=self.steps,
            sent=now,
            phase=self._phase,
            last_seconds=self._last,
            mean_seconds=self._mean.value,
            input_seconds=self._step_timer.input.value,
            skipped=self.skipped,
            loss_finite=self._finite,
            finite_step=self._finite_step,
            nonfinite_step=self._nonfinite_step,
            loss_scale=self.loss_scale,
            gradient_norm=self._norm.value,
            memory=self._memory,
            communication_seconds=self._communication,
            wait_seconds=self._step_timer.wait.value,
            work_seconds=self._step_timer.work.value,
            wait_source=WaitSource.DEVICE if self._step_timer.device == "cuda" else WaitSource.HOST,
            pipeline_stage=self._role,
            forward_passes=self._forward_passes(),
            totals=self._step_timer.totals,
            evaluation_seconds=self._evaluation or None,
        )
        self._page.write(encode(message))


def _memory() -> DeviceMemory | None:
    """Return the figures of torch's allocator for the current device.

    None if CUDA is not in use. Initializes nothing.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    size = torch.cuda.memory_stats_as_nested_dict()
    allocated = size["allocated_bytes"]["all"]
    return DeviceMemory(
        allocated["current"], size["reserved_bytes"]["all"]["current"], allocated["peak"]
    )
