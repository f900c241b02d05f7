"""A loop as Hugging Face's Trainer has it, which knows of no heartbeat: script_trainer.py STEPS.

It keeps its own clock. Gradients are accumulated over four batches, which are fetched together; a
log every ten steps gathers the loss, an evaluation every 20 gathers predictions, and a checkpoint
every 40 is written by rank 0, for which the others wait. Nothing marks it.
"""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.training.own_clock import OwnClock, SlowLinear

steps, accumulated = int(sys.argv[1]), 4
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
clock = OwnClock()
model = DistributedDataParallel(SlowLinear(8, 8, clock, 0.025 + 0.01 * rank))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def gather(values: torch.Tensor) -> torch.Tensor:
    """Return the values of all ranks."""
    gathered = [torch.empty_like(values) for _ in range(size)]
    with clock("wait"):
        dist.all_gather(gathered, values)
    return torch.cat(gathered)


def batches(seconds: float, count: int) -> list[torch.Tensor]:
    """Return the next batches, which take a while each."""
    found = []
    for _ in range(count):
        clock.sleep("input", seconds)
        found.append(torch.randn(4, 8))
    return found


@torch.no_grad()
def evaluate() -> float:
    """Return the loss over the evaluation set."""
    model.eval()
    losses = []
    for batch in batches(0.05, 10):
        with clock("evaluation"):
            outputs = model.module(batch)
            gathered = [torch.empty_like(outputs) for _ in range(size)]
            dist.all_gather(gathered, outputs)
            losses.append(torch.cat(gathered).square().mean())
    return float(torch.stack(losses).mean())


def save() -> None:
    """Write a checkpoint, which is like input for who does not know of it."""
    if rank == 0:
        with clock("input", 2.0):
            torch.save(
                {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()},
                f"{os.environ['CHECKPOINTS']}/checkpoint.pt",
            )
    with clock("wait"):
        dist.barrier()


total = torch.zeros(1)
for step in range(1, steps + 1):
    model.train()  # type: ignore[no-untyped-call] # as torch has it
    samples = batches(0.02, accumulated)
    for index, batch in enumerate(samples):
        last = index == accumulated - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = model(batch).square().mean() / accumulated
            with clock("wait"):
                loss.backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    model.zero_grad()
    if step == 1:
        clock.restart()
    if step % 10 == 0:
        print(f"rank {rank} step {step} loss {gather(total).mean().item():.3f}", flush=True)
    if step % 20 == 0:
        with clock("evaluation"):
            evaluate()
    if step % 40 == 0:
        save()
print(f"rank {rank} attempt 0 spent {clock.line()}", flush=True)
os._exit(0)  # what torch does at its exit is no training
