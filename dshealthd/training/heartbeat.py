"""The heartbeat of one training process; whatever fails in it, the training goes on."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from dshealthd.training.message import DeviceMemory, Message, Phase, StepStage, encode
from dshealthd.training.page import DEFAULT_PATH, Page
from dshealthd.training.readback import Readback
from dshealthd.training.saved import Saved
from dshealthd.training.saved import encode as encode_saved
from dshealthd.training.step_timer import Average, StepTimer

log = logging.getLogger("dshealthd.training")

SLOW_INTERVAL = 1.0
"""Seconds for which memory and communication, which cost more to read, are told again."""

Method = TypeVar("Method", bound=Callable[..., Any])


def never_raise(method: Method) -> Method:
    """Keep what goes wrong in a heartbeat, the first argument, away from the training.

    It is said once, and the heartbeat ends.
    """

    @functools.wraps(method)
    def call(heartbeat: Heartbeat, *arguments: Any, **named: Any) -> Any:
        if heartbeat.closed:
            return None
        try:
            return method(heartbeat, *arguments, **named)
        except Exception:  # noqa: BLE001 - no defect of ours and no release of torch or DeepSpeed may end a training
            heartbeat.give_up()
            return None

    return call  # type: ignore[return-value] # the same signature


class Heartbeat:
    """Tells the agent of every step.

    A process has one; it survives fork, whose child is a sender of its own.

    Nothing here waits for a device, the agent or a lock. What is told is of the moment of the
    message, but for these:

    - the stage is the host's, which launches work and is ahead of its device: a host that waits for
      results (`loss.item()`) after a step
      is in the stage of the input, whatever its device does;
    - times of input and forward pass: late by some steps on a CUDA device, as `step_timer.StepTimer` says;
    - loss and gradient norm on a CUDA device: late by a step or more, as `readback.Readback` says;
    - memory and time of communication: up to a second old, as reading them costs tens of
      microseconds;
    - the step time is the time from the end of one step to the end of the next on the host. Where a
      training never waits for its
      device, steps end when their kernels are launched: single durations then vary, their mean is
      right, as launching is held up when the device's queue is full.
    """

    def __init__(self, *, step: int = 0, socket: str | None = None) -> None:
        """Prepare; `step` is how many steps were made before, `socket` where the agent listens."""
        self.closed = os.environ.get("DSHEALTHD_HEARTBEAT") == "0"
        self._page = Page(socket or os.environ.get("DSHEALTHD_HEARTBEAT_SOCKET") or DEFAULT_PATH)
        self.steps = step
        """Optimizer steps so far."""
        self._phase = Phase.TRAINING
        self._stage = StepStage.UNKNOWN
        self._step_timer = StepTimer()
        self._nonfinite = 0
        self._finite: bool | None = None
        self._last: float | None = None
        self._mean = Average()
        self._ended: float | None = None
        self._paused = 0.0
        self._pause_began: float | None = None
        self._loss = Readback()
        self._norm = Readback()
        self._memory: DeviceMemory | None = None
        self._communication: float | None = None
        self._slow_due = 0.0
        self._undo: list[Callable[[], object]] = []
        self._saves = 0
        self.skipped: int | None = None
        """Steps that were skipped so far; None if that cannot be known."""
        self.loss_scale: float | None = None
        self.communication: Callable[[], float | None] | None = None
        """Returns the seconds spent in collectives so far, without waiting."""

    @never_raise
    def step(self, step: int | None = None) -> None:
        """Say in the heartbeat that an optimizer step was made, as `attach` does by itself.

        `step` is its number if it is known better.
        """
        now = time.monotonic()
        self.steps = self.steps + 1 if step is None else step
        # Else it is not known how long the pause was.
        if self._ended is not None and self._pause_began is None:
            self._last = max(now - self._ended - self._paused, 0.0)
            self._mean.add(self._last)
        self._ended, self._paused, self._pause_began = now, 0.0, None
        self._phase = Phase.TRAINING  # who makes steps trains, whatever was marked before
        if self._stage is not StepStage.UNKNOWN:
            self._stage = StepStage.INPUT
            self._step_timer.step_ended(now)
        self._tell(now)

    @never_raise
    def micro_step(self) -> None:
        """Say in the heartbeat that a micro-step was made which is no step yet."""
        now = time.monotonic()
        if self._stage is not StepStage.UNKNOWN:
            self._stage = StepStage.INPUT
            self._step_timer.micro_step_ended(now)
        self._tell(now)

    @never_raise
    def forward_began(self, model: Any, *, computes: bool) -> None:
        """Say in the heartbeat that a forward pass of `model` begins.

        And that it computes, or that `compute_began` will be called when it does.
        """
        now = time.monotonic()
        # Only now is the model where it will be: it may be moved to its device after the engine was
        # made.
        if self._stage is StepStage.UNKNOWN:
            parameter = next(model.parameters(), None)
            self._step_timer.on(
                "" if parameter is None else parameter.device.type, sys.modules["torch"].cuda
            )
        self._stage = StepStage.FORWARD
        self._step_timer.input_ended(now)
        if computes:
            self._step_timer.forward_began(now)
        self._tell(now)

    @never_raise
    def compute_began(self) -> None:
        """Say in the heartbeat that the model within a wrapper begins to compute.

        What that takes is the time of the forward pass.
        """
        self._step_timer.forward_began(time.monotonic())

    @never_raise
    def compute_ended(self) -> None:
        """Say in the heartbeat that the model has computed."""
        self._step_timer.forward_ended(time.monotonic())

    @never_raise
    def forward_ended(self, *, computes: bool) -> None:
        """Say in the heartbeat that the forward pass has ended, and with it computing, unless said
        before.
        """
        now = time.monotonic()
        self._stage = StepStage.BACKWARD
        if computes:
            self._step_timer.forward_ended(now)
        self._tell(now)

    @never_raise
    def loss(self, loss: Any) -> None:
        """Say in the heartbeat what the loss is: a number, or a tensor with one element.

        Whether it is finite is reported.
        """
        self._loss.offer(loss, time.monotonic())

    @never_raise
    def gradient_norm(self, norm: Any) -> None:
        """Say in the heartbeat what the gradients' norm is: what `torch.nn.utils.clip_grad_norm_`
        returns.
        """
        self._norm.offer(norm, time.monotonic())

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark in the heartbeat what is no training: `evaluation`, `checkpoint`, `compile` or `other`.

        It counts neither as a hang nor as step time.
        """
        before = self._phase
        self.enter(name)
        try:
            yield
        finally:
            self.enter(before.name)

    @never_raise
    def enter(self, name: str) -> None:
        """Mark a phase in the heartbeat without a with statement; the next step, or
        `enter("training")`, ends it.
        """
        phase = getattr(Phase, name.upper(), Phase.OTHER)
        if phase is self._phase:
            return
        now = time.monotonic()
        if self._phase is Phase.TRAINING:
            self._pause_began = now
            self._step_timer.interrupted()
        elif phase is Phase.TRAINING and self._pause_began is not None:
            self._paused += now - self._pause_began
            self._pause_began = None
        self._phase = phase
        self._tell(now)

    @never_raise
    def saved(
        self,
        directory: str | os.PathLike[str],
        *,
        optimizer_files: int | None = None,
        node_local: bool = False,
    ) -> None:
        """Say that a checkpoint was saved in a directory, as `attach(engine)` does by itself.

        The agent then looks, with the rights of this process's user, whether the next one finds
        room and whether this one is complete. A path of more than some 480 bytes is not told, nor
        a relative one whose working directory was removed.
        """
        self._saves += 1
        with contextlib.suppress(ValueError, OSError):
            place = os.path.abspath(directory)
            self._page.note(encode_saved(Saved(place, self._saves, optimizer_files, node_local)))

    def close(self) -> None:
        """Send no more heartbeats, and let go of what was attached to."""
        self.closed = True
        while self._undo:
            self._undo.pop()()
        self._page.close()

    def on_close(self, undo: Callable[[], object]) -> None:
        """Have the heartbeat's `close` call this."""
        self._undo.append(undo)

    def give_up(self) -> None:
        """End the heartbeat over the exception that is being handled, and say so."""
        log.warning("the heartbeat ends, the training goes on", exc_info=sys.exc_info())
        self.closed = True
        self._page.close()  # else the agent would go on reading what is true no more

    def __enter__(self) -> Heartbeat:  # noqa: PYI034 - Self needs Python 3.11
        """Return the heartbeat, which is closed at the end."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tell(self, now: float) -> None:
        """Write a message of the heartbeat to its page."""
        loss = self._loss.take()
        if loss is not None:
            # NaN and the infinities minus themselves are NaN.
            self._finite = loss - loss == 0.0
            self._nonfinite += not self._finite
        if now >= self._slow_due:
            self._slow_due = now + SLOW_INTERVAL
            self._memory = _memory()
            if self.communication is not None:
                self._communication = self.communication()
        self._norm.take()
        message = Message(
            self.steps,
            now,
            self._phase,
            self._stage,
            self._last,
            self._mean.value,
            self._step_timer.input.value,
            self._step_timer.forward.value,
            self.skipped,
            self._finite,
            self._nonfinite,
            self.loss_scale,
            self._norm.value,
            self._memory,
            self._communication,
        )
        self._page.write(encode(message), now)


def _memory() -> DeviceMemory | None:
    """Return what torch's allocator knows of the current device, for the heartbeat.

    None where CUDA is not in use. Initialises nothing.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    size = torch.cuda.memory_stats_as_nested_dict()
    allocated = size["allocated_bytes"]["all"]
    return DeviceMemory(
        allocated["current"], size["reserved_bytes"]["all"]["current"], allocated["peak"]
    )
