"""Steps of plain torch: of one optimizer, of the scaler that steps it, or of any in a program."""

from __future__ import annotations

import functools
import logging
import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dshealthd.training import step_timer
from dshealthd.training.engine import after
from dshealthd.training.engine import follow as follow_engine
from dshealthd.training.heartbeat import Heartbeat, never_raise
from dshealthd.training.installed import compiling
from dshealthd.training.model import find, instances, trains
from dshealthd.training.model import follow as follow_model
from dshealthd.training.readback import Readback

if TYPE_CHECKING:
    from types import FrameType

log = logging.getLogger("dshealthd.training")

_ENGINE = f"{os.sep}deepspeed{os.sep}runtime{os.sep}"
_FRAMES = 12
"""Stack frames searched for DeepSpeed."""
SUCCEEDS = 10
"""Steps of another optimizer, without one of the first, from which on it is the one that trains: a
GAN's discriminator makes five for each of its generator (https://arxiv.org/abs/1704.00028). They
are counted, so that all ranks change at the same step.
"""


@never_raise
def follow(heartbeat: Heartbeat, optimizer: Any, scaler: Any = None) -> None:
    """Report the steps of `optimizer`.

    With `scaler`, a step ends with `scaler.update()`, because a step skipped for an overflow does
    not reach the optimizer. A skipped step shows as a falling scale. The scale is read back from
    the device at a later step, so skipped steps are reported late.
    """
    while not hasattr(optimizer, "_optimizer_step_post_hooks") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer  # a wrapper around torch's, such as Accelerate's
    heartbeat.parameters = functools.partial(_parameters, weakref.ref(optimizer))
    if scaler is None or not scaler.is_enabled():
        handle = optimizer.register_step_post_hook(
            lambda _optimizer, _arguments, _named: heartbeat.step()
        )
        heartbeat.installed.add(handle.remove)
    else:
        heartbeat.skipped, scale = 0, Readback()
        updated = after(lambda scaler, _: _scaled(heartbeat, scale, scaler))
        heartbeat.installed.follow(scaler, "update", updated)


def _parameters(reference: weakref.ref[Any]) -> Iterator[Any]:
    optimizer = reference()
    for group in [] if optimizer is None else optimizer.param_groups:
        yield from group["params"]


@never_raise
def _scaled(heartbeat: Heartbeat, scale: Readback, scaler: Any) -> None:
    """Report a step of the gradient scaler.

    The scale's tensor is read because `get_scale()` would wait for the device.
    """
    # the only access that does not wait
    scale.offer(scaler._scale, time.monotonic())  # noqa: SLF001
    value, before = scale.poll(), heartbeat.loss_scale
    if value is not None:
        if before is not None and 0.0 < value < before:
            # Each skipped step lowers the scale by the same factor; several may lie between two
            # readings.
            heartbeat.skipped = (heartbeat.skipped or 0) + round(
                math.log(value / before) / math.log(scaler.get_backoff_factor())
            )
        heartbeat.loss_scale = value
    heartbeat.step()


class AnyOptimizer:
    """A hook on the steps of all torch optimizers, for a program that is not changed.

    It reports the optimizer that makes the first step, and as the loss the scalar whose backward
    pass is called. Others, such as a second model's, are left out because their steps are not the
    job's. How many steps that DeepSpeed makes are one engine step depends on its settings: its
    engine is followed instead, as `attach(engine)` does, from its second step on. Steps that a
    GradScaler skips are not seen.

    When the optimizer is gone, the next that steps takes its place, with its model; so does one
    that makes SUCCEEDS steps while it makes none, as after a warm-up. To find a model takes long,
    so a program that keeps making optimizers has its models searched for at times only; steps until
    then have no stages.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._main: weakref.ref[Any] | None = None
        self._engine_drives = False
        self._model: Callable[[], Any] | None = None
        self._in_model = heartbeat.installed.part()
        self._is_searched = False
        """Whether the main optimizer's model has been searched for."""
        self._searched, self._took = -math.inf, 0.0
        """When the last search for a model ended, and how long it took."""
        self._other: weakref.ref[Any] | None = None
        self._others, self._since = 0, -1
        """Steps that another optimizer has made since the main one made its last, and which that
        was.
        """

    def register(self) -> None:
        """Register with torch, which must be imported, for every step of any optimizer."""
        _register(self._heartbeat, self)

    def __call__(self, optimizer: Any, _arguments: Any, _named: Any) -> None:
        """Report an optimizer's step: torch calls this after each step of any."""
        if self._is_searched and self._main is not None and self._main() is optimizer:
            self._heartbeat.step()
        else:
            _stepped(self._heartbeat, self, optimizer)

    def reports(self, optimizer: Any) -> bool:
        """Return whether the steps of this optimizer are the job's."""
        main = self._main() if self._main is not None else None
        if self._engine_drives:
            return False
        if main is optimizer:
            self._follow_model(optimizer)
            return True
        if main is not None and not self._succeeds(optimizer):
            return False
        if _driven_by_engine():
            self._engine_drives = True
            engine = _engine_of(optimizer)
            if engine is None:
                log.warning(
                    "no heartbeat: DeepSpeed steps this optimizer, and its engine was not found; "
                    "call dshealthd.training.attach(engine)"
                )
            else:
                follow_engine(self._heartbeat, engine)
            return False
        if self._main is None:
            losses = functools.partial(_losses, self._heartbeat)
            self._heartbeat.installed.replace(sys.modules["torch"].Tensor, "backward", losses)
        self._main = weakref.ref(optimizer)
        self._heartbeat.parameters = functools.partial(_parameters, self._main)
        self._follow_model(optimizer)
        return True

    def _succeeds(self, optimizer: Any) -> bool:
        """Return whether an optimizer that steps now trains in place of the main one: the first
        that has made a step since.
        """
        steps = self._heartbeat.steps
        if steps != self._since or self._other is None or self._other() is None:
            self._other, self._others, self._since = weakref.ref(optimizer), 0, steps
        if self._other() is not optimizer:
            return False
        self._others += 1
        return self._others >= SUCCEEDS

    def _follow_model(self, optimizer: Any) -> None:
        """Report the stages of the model that an optimizer trains, and of none before it."""
        followed = self._model() if self._model is not None else None
        self._is_searched = followed is not None and trains(optimizer, followed)
        if self._is_searched:
            return
        self._model = None
        self._in_model.undo()
        now = time.monotonic()
        if (now - self._searched) * step_timer.SHARE < self._took:
            return
        self._is_searched = True
        model = find(optimizer)
        self._searched = time.monotonic()
        self._took = self._searched - now
        if model is not None:
            self._model = weakref.ref(model)
            follow_model(self._heartbeat, model, self._in_model)


def _driven_by_engine() -> bool:
    # documented; inspect would read source files
    frame: FrameType | None = sys._getframe()  # noqa: SLF001
    for _ in range(_FRAMES):
        if frame is None:
            break
        if _ENGINE in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _engine_of(optimizer: Any) -> Any:
    """Return the engine that steps `optimizer`; None if it is not known.

    Searches all objects that Python tracks, once (`model.find`).
    """
    kind = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", None)
    if kind is None:
        return None
    engines = instances(kind)
    own = [engine for engine in engines if getattr(engine, "basic_optimizer", None) is optimizer]
    found = own or engines
    return found[0] if len(found) == 1 else None


def _losses(heartbeat: Heartbeat, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.Tensor.backward`, which reports the scalar that it is called of."""
    is_traced = compiling()

    def backward(tensor: Any, *arguments: Any, **named: Any) -> Any:
        if not is_traced() and heartbeat.measures:
            heartbeat.loss(tensor)
        return original(tensor, *arguments, **named)

    return backward


@never_raise
def _register(heartbeat: Heartbeat, hook: AnyOptimizer) -> None:
    handle = sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(hook)
    heartbeat.installed.add(handle.remove)


@never_raise
def _stepped(heartbeat: Heartbeat, hook: AnyOptimizer, optimizer: Any) -> None:
    if hook.reports(optimizer):
        heartbeat.step()
