"""A small training over NCCL that fails on purpose: one rank of it.

Run by `launch.py`, with PyTorch's CUDA wheel, as a program of its own. Kernels do nothing here, so
that a collective which cannot end, as a rank is missing, is one whose GPU is told to hold
(`sim/cudart.c`); all else that happens is what PyTorch and NCCL do by themselves.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import signal
import struct
import time

STEPS = 3
NUMBERS = 1024
FREE, HOLD, SILENT = 0, 1, 2
"""What a GPU may do, as `sim/cudart.c` and `cuda.c` read it."""
FOREVER = 600.0
FAULTS = (
    "none",
    "absent",
    "stopped",
    "killed",
    "raises",
    "other-operation",
    "other-size",
    "symmetric",
    "silent-driver",
)


def control(state: int) -> None:
    """Say what this rank's GPU may do from now on."""
    with open(os.environ["NCCLSIM_CONTROL"], "r+b") as file:
        file.write(struct.pack("=i", state))


def load_batch() -> None:
    """Do what a loader does whose storage is gone."""
    time.sleep(FOREVER)


def load_sample(step: int) -> int:
    """Read a data set with a bad sample."""
    return {number: number for number in range(step)}[step]


def main() -> None:
    """Train for some steps, and then fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--fault", choices=FAULTS, required=True)
    parser.add_argument("--culprit", type=int, default=0)
    parser.add_argument("--timeout", type=float, required=True, help="of a collective, in seconds")
    arguments = parser.parse_args()
    rank = int(os.environ["RANK"])
    # Each GPU is told apart; the simulation looks when it is called first.
    os.environ["NCCLSIM_CONTROL"] = place = f"{arguments.folder}/control-{rank}"
    with open(place, "wb") as file:
        file.write(bytes(os.sysconf("SC_PAGESIZE")))

    import torch
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=dt.timedelta(seconds=arguments.timeout))
    gradient = torch.ones(NUMBERS).to("cuda")
    for step in range(STEPS):
        dist.all_reduce(gradient)
        torch.cuda.synchronize()
        print(f"step {step} | loss {2.5 - step / 10}", flush=True)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"trained/{rank}", "1")
    store.wait([f"trained/{other}" for other in range(dist.get_world_size())])
    with open(f"{arguments.folder}/pid-{rank}", "w") as file:
        file.write(f"{os.getpid()}")
    fault = arguments.fault if rank == arguments.culprit else ""
    if arguments.fault == "none":
        dist.destroy_process_group()
        return
    control(HOLD)
    if fault == "absent":
        load_batch()
    elif fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "raises":
        load_sample(STEPS)
    elif fault == "other-operation":
        parts = torch.ones(NUMBERS * dist.get_world_size()).to("cuda")
        dist.all_gather_into_tensor(parts, gradient)
    elif fault == "other-size":
        gradient = torch.ones(NUMBERS + 8).to("cuda")
        dist.all_reduce(gradient)
    else:
        dist.all_reduce(gradient)
    if fault == "silent-driver":
        control(SILENT)
    torch.cuda.synchronize()
    time.sleep(FOREVER)


if __name__ == "__main__":
    main()
