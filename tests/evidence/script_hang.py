"""A training of two ranks that hangs: python script_hang.py.

Rank 1 never enters the fourth all-reduce. Rank 0 prints once it has entered it, and both once their
flight recorders show the three before as done, which a thread of gloo writes some time after them.

gloo has no thread that listens at the FIFO of the flight recorder, as NCCL's process group has: one
of this script's does it, and writes what torch itself dumps.
"""

import contextlib
import datetime as dt
import os
import pickle
import threading
import time

import torch
import torch.distributed as dist

# what torch's own tools call
from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]


def dump_when_asked(place: str, dump: str) -> None:
    """Do as torch's `DumpPipe` does."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(place)
    os.mkfifo(place)
    descriptor = os.open(place, os.O_RDONLY | os.O_NONBLOCK)
    while True:
        with contextlib.suppress(BlockingIOError):
            if os.read(descriptor, 128):
                trace = _dump_fr_trace()
                with open(dump, "wb") as file:
                    file.write(trace)
        time.sleep(0.2)


def wait_for_input() -> None:
    """Do what a loader does whose storage is gone."""
    time.sleep(600)


dist.init_process_group("gloo", timeout=dt.timedelta(seconds=600))
rank = dist.get_rank()
gradient = torch.ones(4, 2)
for _ in range(3):
    dist.all_reduce(gradient)
# The first dump loads what resolves stacks, for seconds on a busy machine.
# A work is retired before its group's status says that it is completed.
while [
    one["last_completed_collective"] for one in pickle.loads(_dump_fr_trace())["pg_status"].values()
] != [3]:
    time.sleep(0.1)
if prefix := os.environ.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE"):
    arguments = (f"{prefix}{rank}.pipe", os.environ["TORCH_FR_DUMP_TEMP_FILE"] + str(rank))
    threading.Thread(target=dump_when_asked, args=arguments, daemon=True).start()
    while not os.path.exists(arguments[0]):
        time.sleep(0.1)
if rank == 1:
    print("rank 1 hangs", flush=True)
    wait_for_input()
waiting = dist.all_reduce(gradient, async_op=True)
print("rank 0 hangs", flush=True)
waiting.wait()
