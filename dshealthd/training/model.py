"""Forward passes of a torch module, seen as it is called: the stage of a step.

Stages are those of the outermost module. With DDP that is the wrapper, whose forward pass begins
with a collective if the model has buffers: a wait for other ranks, until the module within is
called.

A module that is called within compiled code has no stages; that which `torch.compile` returned, or
`Module.compile` compiled in place, is called from outside.
"""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import sys
from collections.abc import Callable
from typing import Any

from dshealthd.training.heartbeat import Heartbeat, never_raise
from dshealthd.training.installed import Installed, compiling

log = logging.getLogger("dshealthd.training")


@never_raise
def follow(heartbeat: Heartbeat, model: Any, installed: Installed) -> None:
    """Report the stages of steps by the forward passes of `model`, until `installed` is undone.

    Those in evaluation mode are no step's.
    """
    if not hasattr(model, "register_forward_pre_hook"):
        log.warning("step stages unavailable: %s is not a torch module", type(model).__name__)
        return
    inner = _unwrapped(model)
    distributed = _distributed(model)
    # Before each forward pass it has all ranks wait for rank 0's buffers.
    synchronized = distributed and next(iter(inner.buffers()), None) is not None

    # What is called must not refer to the model: garbage collection alone would free its memory.
    def computes(_module: Any) -> None:
        if synchronized and heartbeat.measures:
            heartbeat.synchronized()

    def ended(result: Any) -> None:
        heartbeat.forward_ended(result)
        if heartbeat.measures:
            heartbeat.follow_backward(result)

    began = functools.partial(heartbeat.forward_began, synchronizes=True)
    wrap = functools.partial(
        _around,
        began if synchronized else heartbeat.forward_began,
        ended if distributed else heartbeat.forward_ended,
        heartbeat.evaluated,
    )
    installed.follow(model, "__call__", wrap)
    if inner is not model:  # evaluations often call it alone
        wrap = functools.partial(_around, computes, lambda _result: None, heartbeat.evaluated)
        installed.follow(inner, "__call__", wrap)


def _around(
    began: Callable[[Any], None],
    ended: Callable[[Any], None],
    evaluated: Callable[[], None],
    call: Callable[..., Any],
) -> Callable[..., Any]:
    """Return a module's `__call__` that calls `began` with the module and `ended` with the result
    around each forward pass in training, and `evaluated` after each of another.

    It is not done by hooks, which are a part of the module, and run inside it: FSDP 2 waits for
    parameters in one, and a rank that waits there has begun the step.
    """
    is_traced = compiling()

    def forward(module: Any, *arguments: Any, **named: Any) -> Any:
        if is_traced():
            return call(module, *arguments, **named)
        if not module.training:
            result = call(module, *arguments, **named)
            evaluated()
            return result
        began(module)
        result = call(module, *arguments, **named)
        if module.training:
            ended(result)
        return result

    return forward


def trains(optimizer: Any, model: Any) -> bool:
    """Return whether a module has all parameters of an optimizer."""
    had = {id(parameter) for parameter in model.parameters()}
    return all(id(one) in had for group in optimizer.param_groups for one in group["params"])


def find(optimizer: Any) -> Any:
    """Return the model: the module that no other module contains and that has all parameters of
    `optimizer`.

    None if there is none, or more than one.

    Searches all objects that Python tracks, once, which takes about a tenth of a second. Searching
    the callers' local variables would do as well, but before Python 3.13 reading them keeps their
    current values alive for as long as the function runs.
    """
    modules = instances(sys.modules["torch"].nn.Module)
    held = {id(part) for module in modules for part in vars(module).get("_modules", {}).values()}
    fitting = [module for module in modules if id(module) not in held and trains(optimizer, module)]
    return fitting[0] if len(fitting) == 1 else None


def instances(kind: type) -> list[Any]:
    """Return all objects of a Python class and its subclasses.

    Refers to no other object while another thread can run: a thread that fills a tuple, as in
    `tuple(generator)`, fails with a SystemError if anything else refers to the tuple meanwhile
    (before Python 3.14: python/cpython#127058), and that thread would be the training's. So one
    call of C code, during which no other thread runs, reads the types of all objects and has let go
    of the objects when it returns; then an object is found by its reference to its class.
    """
    every_object = itertools.chain.from_iterable(map(gc.get_objects, (None,)))
    kinds = set(filter(kind.__subclasscheck__, map(type, every_object)))
    # By type: isinstance may run foreign code.
    return [found for found in gc.get_referrers(*kinds) if issubclass(type(found), kind)]


def _unwrapped(model: Any) -> Any:
    """Return the module that only computes, inside a wrapper that also communicates."""
    distributed = sys.modules["torch"].nn.parallel.DistributedDataParallel
    engine = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", distributed)
    return model.module if isinstance(model, (distributed, engine)) else model


def _distributed(model: Any) -> bool:
    """Return whether a module, or the one that was compiled to it, is DistributedDataParallel."""
    module = getattr(model, "_orig_mod", model)
    return isinstance(module, sys.modules["torch"].nn.parallel.DistributedDataParallel)
