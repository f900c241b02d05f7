"""A small training job that fails on purpose, for genuine logs: one rank of it.

Run by `genuine.py` under torchrun, DeepSpeed's launcher or alone. What it prints is what torch,
DeepSpeed and Python print; only what takes a GPU is raised with the text of torch's sources.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

STEPS = 8
FAULT_AT = 4
TIMEOUT = dt.timedelta(seconds=8)
OUT_OF_MEMORY = (  # CUDACachingAllocator.cpp of torch 2.4 to 2.13
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU {gpu} has a total capacity of 79.15 GiB "
    "of which 1.21 GiB is free. Including non-PyTorch memory, this process has 77.93 GiB memory in "
    "use. Of the allocated memory 75.02 GiB is allocated by PyTorch, and 1.53 GiB is reserved by "
    "PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation "
    "for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)


class OutOfMemoryInBackward(torch.autograd.Function):
    """Its gradient finds no memory."""

    @staticmethod
    def forward(_context: Any, value: torch.Tensor) -> torch.Tensor:
        """Do nothing."""
        return value.clone()

    @staticmethod
    def backward(_context: Any, _gradient: torch.Tensor) -> torch.Tensor:
        """Fail."""
        raise torch.OutOfMemoryError(OUT_OF_MEMORY.format(gpu=os.environ["LOCAL_RANK"]))


class Net(nn.Module):
    """Two layers, and what is to happen in `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.fault = ""
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Run the layers."""
        if self.fault == "oom-forward":
            raise torch.OutOfMemoryError(OUT_OF_MEMORY.format(gpu=os.environ["LOCAL_RANK"]))
        hidden = self.layers(batch)
        if self.fault == "oom-backward":
            hidden = OutOfMemoryInBackward.apply(hidden)  # type: ignore[no-untyped-call]
        return torch.as_tensor(hidden)


def load_shard(step: int) -> torch.Tensor:
    """A data set with one bad sample."""
    samples = {number: torch.randn(4, 32) for number in range(STEPS) if number != FAULT_AT}
    return samples[step]


def save(model: nn.Module, path: str) -> None:
    """Save as a training does."""
    with open(path, "wb") as file:
        file.write(b"checkpoint" * 10_000)
    torch.save(model.state_dict(), path)


def strike(fault: str, model: Any) -> None:
    """Do to this rank what the fault is, before a step."""
    if fault in {"oom-forward", "oom-backward"}:
        model.fault = fault
    elif fault == "user-error":
        load_shard(FAULT_AT)
    elif fault == "host-allocation":
        torch.empty(1 << 58)
    elif fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif fault == "exit":
        sys.exit(3)
    elif fault == "disk-full":
        save(model, "/dev/full")
    elif fault in {"hang", "hang-backward"}:
        time.sleep(600)
    elif fault == "device-ordinal":
        message = (  # c10/cuda/CUDAException.cpp of torch 2.13
            "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have "
            "enough GPUs?\nCUDA kernel errors might be asynchronously reported at some other API "
            "call, so the stacktrace below might be incorrect.\nFor debugging consider passing "
            "CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side "
            "assertions.\n"
        )
        raise torch.AcceleratorError(message)
    elif fault == "bad-shape":
        model.load_state_dict({"layers.0.weight": torch.zeros(3, 3)}, strict=False)
    elif fault == "checkpoint-missing":
        torch.load("/srv/checkpoints/global_step1000/mp_rank_00_model_states.pt")
    elif fault == "half":
        torch.nn.functional.ctc_loss(
            torch.zeros(5, 1, 3, dtype=torch.half),
            torch.ones(1, 2, dtype=torch.long),
            torch.tensor([5]),
            torch.tensor([2]),
        )


def train(fault: str, culprit: int) -> None:
    """Train with torch alone."""
    rank = int(os.environ["RANK"])
    mine = fault if rank == culprit else ""
    if mine == "stuck-init":
        time.sleep(600)
    if mine == "unreachable":
        os.environ["MASTER_PORT"] = "9"
    dist.init_process_group("gloo", timeout=TIMEOUT)
    model = Net()
    if mine == "device-ordinal":
        strike(mine, model)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    start = time.time()
    for step in range(STEPS):
        if step == FAULT_AT and mine and mine != "hang":
            strike(mine, model)
        loss = parallel(torch.randn(4, 32)).square().mean()
        if fault == "nan" and step >= FAULT_AT:
            loss = loss * float("nan")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if fault == "hang":
            if step == FAULT_AT and mine:
                strike(mine, model)
            norm = torch.ones(1)
            dist.all_reduce(norm)
        if rank == 0:
            print(f"step {step}/{STEPS} | loss {loss.item():.4f} | {time.time() - start:.2f} s")
        if fault == "nan-stops" and step >= FAULT_AT:
            message = f"Loss is nan at step {step}, stopping training"
            raise FloatingPointError(message)
    dist.destroy_process_group()
    print(f"rank {rank}: training finished")


def train_deepspeed(fault: str, culprit: int) -> None:
    """Train with DeepSpeed's engine."""
    import deepspeed  # type: ignore[import-untyped]

    rank = int(os.environ["RANK"])
    mine = fault if rank == culprit else ""
    config: Any = {
        "train_batch_size": 24,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 2},
        "steps_per_print": 2,
    }
    config["zero_allow_untested_optimizer"] = True
    if fault == "batch":
        config |= {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}
    elif fault == "stage":
        config["zero_optimization"] = {"stage": 5}
    elif fault == "config-missing":
        config = "/srv/configs/ds_zero3.json"
    elif fault == "fp16":
        config["fp16"] = {"enabled": True}
        config["bf16"] = {"enabled": True}
    model: Any = Net()
    if fault == "sparse":
        model = nn.Sequential(nn.Embedding(16, 32, sparse=True), Net())
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for minutes
    deepspeed.init_distributed("gloo", timeout=TIMEOUT, dist_init_required=True)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    if fault == "loss-scale":
        from deepspeed.runtime.fp16.loss_scaler import (  # type: ignore[import-untyped]
            DynamicLossScaler,
        )

        scaler = DynamicLossScaler(
            init_scale=4,
            scale_window=1000,
            min_scale=1,
            delayed_shift=1,
            consecutive_hysteresis=False,
            raise_error_at_min_scale=True,
            dtype=torch.half,
        )
    folder = os.environ["JOB_DIR"]
    for step in range(STEPS):
        if step == FAULT_AT and mine:
            strike(mine, model)
        if fault == "loss-scale" and step >= FAULT_AT:
            scaler.update_scale(overflow=True)
        batch = torch.randint(16, (4, 2)) if fault == "sparse" else torch.randn(4, 32)
        loss = engine(batch).square().mean()
        engine.backward(loss)
        engine.step()
        if rank == 0:
            print(f"step {step}: loss = {loss.item():.4f}")
    if fault == "checkpoint-world":
        engine.save_checkpoint(folder, tag="global_step8")
        dist.barrier()
        if rank == 0:  # as if written by a job of more ranks
            import glob

            for path in glob.glob(f"{folder}/global_step8/*model_states.pt"):
                state = torch.load(path, weights_only=False)
                state["dp_world_size"] = 16
                torch.save(state, path)
        dist.barrier()
        engine.load_checkpoint(folder, tag="global_step8")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", required=True)
    parser.add_argument("--culprit", type=int, default=1)
    parser.add_argument("--deepspeed-engine", action="store_true")
    parser.add_argument("--local_rank", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    (train_deepspeed if options.deepspeed_engine else train)(options.fault, options.culprit)
