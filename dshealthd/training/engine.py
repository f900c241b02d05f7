"""Steps and checkpoints of a DeepSpeed engine, noticed by wrapping its methods: it has no hooks.

Only numbers that the engine keeps on the host are read. Written against DeepSpeed 0.19; an
attribute that a release lacks is not reported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dshealthd.training.heartbeat import Heartbeat, never_raise, step_count
from dshealthd.training.model import follow as follow_model

if TYPE_CHECKING:
    from dshealthd.training.installed import Wrap


@never_raise
def follow(heartbeat: Heartbeat, engine: Any) -> None:
    """Report the steps of `engine`, and mark its checkpoints and its evaluation (from
    `engine.eval()` to `engine.train()`) as phases.
    """
    if not (hasattr(engine, "global_steps") and hasattr(engine, "step")):
        raise TypeError(f"{type(engine).__name__} is not a DeepSpeed engine")
    heartbeat.steps = step_count(engine.global_steps)
    installed = heartbeat.installed
    if hasattr(engine, "train_batch"):  # a pipeline engine, which makes its steps itself
        installed.follow(engine, "train_batch", after(functools.partial(_step, heartbeat)))
        _follow_pipeline(heartbeat, engine)
    else:
        installed.follow(engine, "step", after(lambda engine, _: _step(heartbeat, engine, None)))
        installed.follow(engine, "backward", _before(heartbeat.loss))
        follow_model(heartbeat, engine, installed)
    phases = {
        "save_checkpoint": _around(heartbeat, "checkpoint", functools.partial(_saved, heartbeat)),
        "load_checkpoint": _around(heartbeat, "checkpoint"),
        "eval_batch": _around(heartbeat, "evaluation"),
        "eval": _before(functools.partial(heartbeat.enter, "evaluation")),
        "train": _before(functools.partial(_entered, heartbeat)),
    }
    for name, wrap in phases.items():
        if hasattr(type(engine), name):
            installed.follow(engine, name, wrap)
    heartbeat.communication = Communication()


@never_raise
def _entered(heartbeat: Heartbeat, mode: bool = True) -> None:  # noqa: FBT001, FBT002 - as torch
    heartbeat.enter("training" if mode else "evaluation")


def _follow_pipeline(heartbeat: Heartbeat, engine: Any) -> None:
    """Report the stages of a pipeline's steps: its engine looks its instructions up in a table.

    A rank that exchanges with another stage may wait for it: it is as far as it can be.
    """
    heartbeat.pipeline_stage = engine.stage_id
    instructions = dict(engine._INSTRUCTION_MAP)  # noqa: SLF001 - the methods are called from there

    # The engine's class has what is called: it must not refer to the module.
    def marked(
        method: Callable[..., Any], begin: Callable[[Any], object], end: Callable[[], object]
    ) -> Callable[..., Any]:
        @functools.wraps(method)
        def called(engine: Any, *arguments: Any, **named: Any) -> Any:
            if not engine.module.training:
                return method(engine, *arguments, **named)
            begin(engine.module)
            result = method(engine, *arguments, **named)
            end()
            return result

        return called

    for instruction, method in instructions.items():
        name = instruction.__name__
        if name == "LoadMicroBatch":
            marks = lambda _: heartbeat.load_began(), heartbeat.load_ended
        elif name == "ForwardPass":
            marks = heartbeat.forward_began, heartbeat.forward_ended
        else:
            marks = lambda _: heartbeat.exchange_began(), lambda: None
        instructions[instruction] = marked(method, *marks)
    heartbeat.installed.change(engine, "_INSTRUCTION_MAP", instructions)


@never_raise
def _step(heartbeat: Heartbeat, engine: Any, loss: Any) -> None:
    """Report the engine's state after a call of its `step`, which makes an optimizer step only at
    the end of a gradient accumulation.
    """
    if loss is not None:
        heartbeat.loss(loss)
    if engine.global_steps == heartbeat.steps:
        heartbeat.micro_step()
        return
    if heartbeat.measures:
        _report(heartbeat, engine)
    heartbeat.step(engine.global_steps)


def _report(heartbeat: Heartbeat, engine: Any) -> None:
    """Report what a DeepSpeed engine keeps of a step: skipped ones, loss scale, gradient norm."""
    heartbeat.skipped = engine.skipped_steps
    optimizer = engine.optimizer
    if engine.fp16_enabled():
        scale = getattr(getattr(optimizer, "loss_scale_config", optimizer), "cur_scale", None)
        heartbeat.loss_scale = float(scale) if isinstance(scale, (int, float)) else None
    norm = engine.get_global_grad_norm()
    if norm is not None:
        heartbeat.gradient_norm(norm)


@never_raise
def _saved(
    heartbeat: Heartbeat,
    engine: Any,
    save_dir: Any,
    tag: Any = None,  # noqa: ARG001 - the arguments of `save_checkpoint`
    client_state: Any = None,  # noqa: ARG001
    save_latest: bool = True,  # noqa: FBT001, FBT002
    *_: Any,
    **__: Any,
) -> None:
    """Report where `engine.save_checkpoint` has saved, and how many optimizer files it wrote.

    Skip a checkpoint saved without `save_latest`: `latest` still names another one.
    """
    if not save_latest:
        return
    node_local = getattr(engine, "use_node_local_storage", None)
    heartbeat.saved(
        save_dir,
        optimizer_files=_optimizer_files(engine),
        node_local=node_local is not None and node_local(),
        deepspeed=True,
    )


def _optimizer_files(engine: Any) -> int | None:
    """Return how many `*_optim_states.pt` the engines of all ranks write together; None if unknown.

    Each rank that holds a part of the optimizer writes one (`_save_zero_checkpoint`). A mixture of
    experts writes different ones.
    """
    group = getattr(engine.optimizer, "dp_process_group", None)
    copies = getattr(engine, "mp_world_size", None)
    if group is None or copies is None or getattr(engine, "has_moe_layers", False):
        return None
    ranks: int = sys.modules["torch"].distributed.get_world_size(group)
    return ranks * int(copies)


def after(then: Callable[[Any, Any], object]) -> Wrap:
    """Have `then` called with an object and the result of each call of its method."""

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        def called(engine: Any, *arguments: Any, **named: Any) -> Any:
            result = method(engine, *arguments, **named)
            then(engine, result)
            return result

        return called

    return wrap


def _before(first: Callable[..., None]) -> Wrap:
    """Have `first` called with the first argument before each call of an engine's method."""

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        def called(engine: Any, *arguments: Any, **named: Any) -> Any:
            first(*(arguments or tuple(named.values()))[:1])
            return method(engine, *arguments, **named)

        return called

    return wrap


def _around(
    heartbeat: Heartbeat, phase: str, then: Callable[..., object] = lambda *_, **__: None
) -> Wrap:
    """Mark each call of an engine's method as a phase; `then` is called with its arguments."""

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        def called(engine: Any, *arguments: Any, **named: Any) -> Any:
            with heartbeat.phase(phase):
                result = method(engine, *arguments, **named)
            then(engine, *arguments, **named)
            return result

        return called

    return wrap


class Communication:
    """The time in collectives that DeepSpeed's comms logger measures (`comms_logger.enabled` in its
    config); the logger itself waits for the device.

    It is read from the logger's timers, because the latency that the logger records for an
    operation (0.19) is the sum of all its calls so far.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._seen: dict[str, int] = {}

    def __call__(self) -> float | None:
        """Return the seconds in collectives that DeepSpeed has logged; None if its logger is off.

        Events that the device has not reached yet are left for the next call.
        """
        comm = sys.modules.get("deepspeed.comm.comm")
        if comm is None or not comm.comms_logger.enabled:
            return None
        for name, timer in list(comm.timers.get_timers().items()):
            events = timer.event_timers
            seen = self._seen.get(name, 0)
            seen = seen if seen <= len(events) else 0  # the timer was reset
            for event in events[seen:]:
                seconds = _elapsed(event)
                if seconds is None:
                    break
                self._seconds += seconds
                seen += 1
            self._seen[name] = seen
        return self._seconds


def _elapsed(event: Any) -> float | None:
    """Return the seconds of an engine's timing: the host's, or those between two device events.

    None if the device has not reached the second event.
    """
    if isinstance(event, float):
        return event
    return (
        event.start_event.elapsed_time(event.end_event) / 1000.0
        if event.end_event.query()
        else None
    )
