"""A probe worker that goes wrong: the real one, whose seat's `adapter` says what to do to whom.

`stage:NAME:ACTION` acts as a stage begins, `collective:N:ACTION` before the Nth all-reduce,
`drag:S` takes so many seconds before each,
`checksum:WHICH` has the CPU count as a device with equal bits, and flips one in `all` its products,
in every `second` or in `none`. This file is the tests' own; the worker that ships knows no such
thing.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

PATH = Path(__file__).resolve().parents[2] / "dshealthd" / "probe" / "workers" / "worker.py"
SPEC = importlib.util.spec_from_file_location("worker", PATH)
assert SPEC is not None
assert SPEC.loader is not None
worker = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(worker)

honest_all_reduce = worker.all_reduce
honest_versions = worker.versions
honest_stage = worker.AgentChannel.stage
honest_prepare = worker.prepare_environment
honest_checksum = worker.checksum
plan: list[str] = []


def act(action: str, argument: str = "") -> None:
    """Do one thing to this process."""
    match action:
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "hang":
            time.sleep(1000)
        case "starve":
            os.sched_setaffinity(0, {int(argument)})
            os.nice(19)
            while True:
                pass
        case "exit":
            print("going home early", file=sys.stderr, flush=True)
            os._exit(3)
        case "raise":
            raise KeyError(argument)
        case "refuse":
            raise RuntimeError(argument)
        case "":
            pass
        case "nonsense":
            os.write(next(fd for fd in range(3, 64) if is_stream(fd)), b"\xff\xff\xff\xff junk")
        case "child":
            child = subprocess.Popen(["sleep", "1000"])
            print(f"child {child.pid}", flush=True)
            Path(argument).write_text(str(child.pid), encoding="ascii")
            time.sleep(1000)
        case "dstate":
            descriptor = os.open(argument, os.O_WRONLY | os.O_CREAT)
            os.write(descriptor, b"x")
            os.fsync(descriptor)


def is_stream(fd: int) -> bool:
    """Say whether a descriptor is the worker's channel."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    except OSError:
        return False


def prepare_environment(job: dict[str, Any]) -> None:
    """Take the plan out of the job."""
    honest_prepare({**job, "adapter": ""})


def stage(agent: Any, name: str) -> None:
    """Begin a stage, and act if it is the one."""
    honest_stage(agent, name)
    if plan and plan[:2] == ["stage", name]:
        act(*plan[2:])


def all_reduce(round_: Any, tensor: Any) -> None:
    """Reduce honestly or not."""
    if plan[:1] == ["drag"]:
        time.sleep(float(plan[1]))
    mine = plan[:1] == ["collective"] and round_.board.entered == int(plan[1])
    if mine and plan[2] == "bad_input":
        tensor[5] += 1
    if mine and plan[2] == "stale":
        round_.board.enter()
        round_.group.allreduce([tensor.clone()]).wait()
        round_.board.leave()
        return
    if mine and plan[2] not in {"bad_input", "bad_output", "swapped"}:
        act(*plan[2:])
    honest_all_reduce(round_, tensor)
    if mine and plan[2] == "bad_output":
        tensor[7] += 1
    if mine and plan[2] == "swapped":
        tensor[3], tensor[4] = tensor[4].item(), tensor[3].item()


def versions(job: dict[str, Any]) -> str:
    """Lie about the versions if asked to."""
    return "gloo torch 1.0" if plan == ["versions"] else str(honest_versions(job))


def reproducible(_device: Any) -> str:
    """Promise equal bits if asked to."""
    return "a simulated library" if plan[:1] == ["checksum"] else ""


def checksum(device: Any, steps: dict[str, Any]) -> Any:
    """Multiply with a bit flipped in some of the products."""
    import torch

    honest_mm, count = torch.mm, itertools.count()

    def flipping(left: Any, right: Any) -> Any:
        product = honest_mm(left, right)
        if plan[1] == "all" or (plan[1] == "second" and next(count) % 2):
            product.view(torch.uint8)[1, 2] ^= 1
        return product

    torch.mm = flipping  # type: ignore[assignment] # one overload is enough
    try:
        return honest_checksum(device, steps)
    finally:
        torch.mm = honest_mm


# a module that was loaded by path
class RankRound(worker.RankRound):  # type: ignore[name-defined,misc]
    """Notes the plan."""

    def __init__(self, agent: Any, board: Any, job: dict[str, Any]) -> None:
        """Take the plan before anything runs."""
        super().__init__(agent, board, job)
        plan[:] = job["adapter"].split(":")


worker.__dict__.update(
    RankRound=RankRound,
    all_reduce=all_reduce,
    versions=versions,
    prepare_environment=prepare_environment,
    reproducible=reproducible,
    checksum=checksum,
)
worker.AgentChannel.stage = stage


def say_what_cuda_does() -> None:
    """Print what is known of GPUs as CUDA refuses to start, hangs and crashes."""
    import torch

    worker.__dict__["CUDA_DEADLINE"] = 1.0
    for what in (("refuse", "The NVIDIA driver is too old"), ("hang",), ("segv",)):
        torch.cuda.init = functools.partial(act, *what)
        control, _ = socket.socketpair()
        print(json.dumps(worker.usable_gpus(control, "")), flush=True)


if os.environ.get("SABOTEUR") == "threads":
    import torch

    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    torch.cuda.init = lambda: None
    torch._C._cuda_getDeviceCount = lambda: 4

if __name__ == "__main__":
    if sys.argv[1:] == ["cuda"]:
        say_what_cuda_does()
    else:
        worker.main(sys.argv[1:])
