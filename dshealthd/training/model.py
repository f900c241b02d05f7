"""Forward passes of a torch module, seen as it is called: the stage of a step.

Stages are those of the outermost module. With DDP that is the wrapper, whose forward pass begins
with a collective if the model has buffers: a wait for other ranks, until the module within is
called.

A module that is called within compiled code has no stages; that which `torch.compile` returned, or
`Module.compile` compiled in place, is called from outside.
"""

from __future__ import annotations

import gc
import itertools
import logging
import sys
import weakref
from typing import TYPE_CHECKING, Any

from dshealthd.training.heartbeat import Heartbeat, never_raise

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("dshealthd.training")


@never_raise
def follow(heartbeat: Heartbeat, model: Any) -> None:
    """Report the stages of steps by the forward passes of `model`.

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
    def began(module: Any) -> None:
        heartbeat.forward_began(module, synchronizes=synchronized)

    def computes(_module: Any) -> None:
        if synchronized and heartbeat.measures:
            heartbeat.synchronized()

    def ended(result: Any) -> None:
        heartbeat.forward_ended()
        if distributed and heartbeat.measures:
            heartbeat.follow_backward(result)

    _around(heartbeat, model, began, ended, heartbeat.evaluated)
    if inner is not model:  # evaluations often call it alone
        _around(heartbeat, inner, computes, lambda _result: None, heartbeat.evaluated)


def _around(
    heartbeat: Heartbeat,
    model: Any,
    began: Callable[[Any], None],
    ended: Callable[[Any], None],
    evaluated: Callable[[], None],
) -> None:
    """Call `began` with a module and `ended` with its result around each forward pass in training,
    and `evaluated` after each of another.

    By its class, not by hooks, which are a part of the module: with ours `torch.save(model)` and
    `torch.jit.script(model)` fail, and copies have them too. Outside of all hooks besides: FSDP 2
    waits for parameters in one, and a rank that waits there has begun the step.
    """
    kind, compiling = type(model), _compiling()
    followed: Callable[[], Any] = weakref.ref(model)
    own = vars(kind).get("__call__")

    def inherited(module: Any, *arguments: Any, **named: Any) -> Any:
        return super(kind, module).__call__(*arguments, **named)

    call = own or inherited

    def forward(module: Any, *arguments: Any, **named: Any) -> Any:
        # The compiler takes the first for true, and traces nothing of ours.
        if compiling() or module is not followed():
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

    def undo() -> None:
        if vars(kind).get("__call__") is not forward:  # somebody has wrapped it after us
            return
        if own is None:
            del kind.__call__
        else:
            kind.__call__ = own

    kind.__call__ = forward
    heartbeat.on_close(undo)


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
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    fitting = [
        module
        for module in modules
        if id(module) not in held
        and optimized <= {id(parameter) for parameter in module.parameters()}
    ]
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


def _compiling() -> Callable[[], bool]:
    """Return torch's test for whether a call is being traced.

    The compiler evaluates it as true, so that nothing of ours is traced.
    """
    compiler = getattr(sys.modules["torch"], "compiler", None)
    return getattr(compiler, "is_compiling", None) or (lambda: False)
