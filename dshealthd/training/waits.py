"""The waits of a rank for other ranks, seen where it blocks.

What is seen, and how long it takes:

- `Work.wait` of c10d: synchronous collectives, barriers, sends and receives end in it, as do those
  of DeepSpeed, ZeRO, FSDP and `torch.distributed.pipelining`; coalesced ones too. On a CPU it
  blocks. On a CUDA device the current stream waits, and events around it measure for how long.
- The backward pass of DistributedDataParallel, whose reducer waits in C++ at its end: from the
  moment at which this rank has computed all its gradients to the end of the pass.
- `wait_tensor` of functional collectives, as DTensor and tensor parallelism use them.
- Of both, in which collective the host waits between two steps, and in which group of all ranks: a
  rank that waits there for others is not one that writes a checkpoint or evaluates.
- Sends and receives, for the role of this rank: the stages of a pipeline do different work.
- On a CUDA device, besides: synchronous operations that run in the current stream (they return no
  work), and events of other streams that the default stream waits for, as FSDP 2 and ZeRO 3 do.

What is not: what compiled code waits for (`torch.compile` of functional collectives), graphs that
are replayed, and libraries with communication of their own. A step in which no wait is seen has an
unknown one.

The wrappers are installed once in a process and removed with the heartbeat. They pass on all
arguments, results and exceptions, and do nothing in other threads than the one that trains.
"""

from __future__ import annotations

import functools
import sys
from binascii import crc32
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dshealthd.training.installed import Installed, compiling
from dshealthd.training.position import INPUT

if TYPE_CHECKING:
    from types import FrameType

OPERATIONS = (
    *("alltoall", "alltoall_base", "all_to_all_single"),
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "gather", "scatter", "barrier"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
)
"""Methods of c10d's `ProcessGroup`; which of them there are depends on the release."""
EXCHANGES = ("send", "recv", "recv_anysource")
"""Those of its methods that meet a single rank, as the stages of a pipeline do."""
OTHER = 100
"""c10d's number of an operation of no known type."""
MAX_TIMEOUT = (1 << 32) - 1
MARKS = 255
"""Marks of groups: those of a byte but 0."""
OUTPUTS = 8
"""Most tensors of a forward pass's result that are followed into the backward pass."""


def collective_timeout() -> int:
    """Return the seconds after which collectives of the default group time out, so that its
    watchdog ends the process; 0 if unknown.

    Reads what `init_process_group` was given, or its default: some 12 µs, once.
    """
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    group = None if c10d is None else c10d.GroupMember.WORLD
    if group is None:
        return 0
    for device in ("cuda", "cpu"):
        try:
            # torch's own Python reads it so
            made = sys.modules["torch"].device(device)
            options = group._get_backend(made).options  # noqa: SLF001
            seconds = int(options._timeout.total_seconds())  # noqa: SLF001
            return min(max(seconds, 0), MAX_TIMEOUT)
        # No such backend, or another release.
        except (AttributeError, RuntimeError, TypeError, ValueError, ArithmeticError):
            continue
    return 0


def follow(heartbeat: Any, device: str) -> None:
    """Report when this process waits for other ranks; its model is on a device of this type."""
    # what Python collectives call has no other name
    c10d = getattr(sys.modules["torch"]._C, "_distributed_c10d", None)  # noqa: SLF001
    if c10d is None or device not in {"cpu", "cuda"}:
        return
    replace, timed = heartbeat.installed.replace, functools.partial(_timed, heartbeat)
    replace(c10d.Work, "wait", timed)
    functional = sys.modules.get("torch.distributed._functional_collectives")
    if functional is not None:
        replace(functional, "wait_tensor", timed)
    for name in EXCHANGES:
        replace(c10d.ProcessGroup, name, functools.partial(_exchanged, heartbeat))
    if device == "cuda":
        for name in OPERATIONS:
            replace(c10d.ProcessGroup, name, functools.partial(_called, heartbeat))
        event = sys.modules["torch"].cuda.Event
        replace(event, "wait", functools.partial(_awaited, heartbeat))


def follow_backward(heartbeat: Any, result: Any, hooks: Installed) -> None:
    """Report the wait at the end of the backward pass that begins at the result of a forward pass
    of DistributedDataParallel.

    A callback that is queued as the pass begins is called before the reducer's own, which waits;
    one that is queued there is called after it.

    `hooks` has those of the result before, which are removed: a program may keep a tensor, and have
    it returned again. The leaf of a graph, such as a parameter, has none: there the pass has ended.
    """
    hooks.undo()
    torch = sys.modules["torch"]
    # DDP and FSDP use it as well
    engine = torch.autograd.Variable._execution_engine  # noqa: SLF001
    queued = False

    def begin(_gradient: Any) -> None:
        nonlocal queued
        if not queued:
            queued = True
            engine.queue_callback(computed)

    def computed() -> None:
        mark = heartbeat.wait_began()
        if mark is not None:
            engine.queue_callback(functools.partial(heartbeat.wait_ended, mark))

    # Else torch warns where a program saves the tensor.
    hook = torch.utils.hooks.unserializable_hook(begin)
    for number, tensor in enumerate(_tensors(result)):
        if number == OUTPUTS:
            break
        if tensor.requires_grad and not tensor.is_leaf:
            hooks.add(tensor.register_hook(hook).remove)


def _tensors(result: Any) -> Iterator[Any]:
    if isinstance(result, sys.modules["torch"].Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for part in result:
            yield from _tensors(part)
    elif isinstance(result, dict):
        yield from _tensors(list(result.values()))


def _timed(heartbeat: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that waits as `original` does, and reports for how long."""
    is_traced = compiling()

    def wait(*arguments: Any, **named: Any) -> Any:
        if is_traced() or not (heartbeat.measures or heartbeat.stage == INPUT):
            return original(*arguments, **named)
        mark = heartbeat.wait_began() if heartbeat.measures else None
        between = heartbeat.collective_began(*arguments[:1])
        try:
            return original(*arguments, **named)
        finally:
            if mark is not None:
                heartbeat.wait_ended(mark)
            if between:
                heartbeat.collective_ended()

    return wait


def awaited_operation(work: Any) -> int:
    """Return the type of the collective that is waited for, as c10d numbers it."""
    kind = getattr(work, "_get_op_type", None)
    return OTHER if kind is None else min(int(kind()), OTHER)


def group(caller: FrameType | None) -> int:
    """Return the mark of the group in whose collective this function of c10d waits: the same in all
    ranks, and other groups have another but for one in 255. A work does not say its group.

    0 for the default group, and for one that has not all ranks: its members may wait in it while
    the rest wait in theirs. 0 as well where it is unknown, as in an asynchronous wait.
    """
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    world = None if c10d is None else c10d.GroupMember.WORLD
    if world is None or caller is None or caller.f_globals is not vars(c10d):
        return 0
    waited = caller.f_locals.get("group")
    name = getattr(waited, "group_name", None)
    if waited is None or waited is world or name is None or waited.size() != world.size():
        return 0
    return 1 + crc32(name.encode()) % MARKS


def _called(heartbeat: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that launches an operation, and reports it as a wait if it has been awaited
    when it returns, which an operation without a work object has.
    """

    def call(*arguments: Any, **named: Any) -> Any:
        if not heartbeat.measures:
            return original(*arguments, **named)
        mark = heartbeat.wait_began()
        work = original(*arguments, **named)
        if mark is not None and work is None:
            heartbeat.wait_ended(mark)
        return work

    return call


def _exchanged(heartbeat: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that sends or receives as `original` does, and reports in which place of
    its group.
    """
    called = _called(heartbeat, original)

    def exchange(*arguments: Any, **named: Any) -> Any:
        if heartbeat.measures:
            heartbeat.exchanged(arguments[0])
        return called(*arguments, **named)

    return exchange


def _awaited(heartbeat: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.cuda.Event.wait`, which reports for how long the default stream waits."""

    def wait(event: Any, stream: Any = None) -> Any:
        if not heartbeat.measures:
            return original(event, stream)
        mark = heartbeat.wait_began(stream)
        try:
            return original(event, stream)
        finally:
            if mark is not None:
                heartbeat.wait_ended(mark)

    return wait
