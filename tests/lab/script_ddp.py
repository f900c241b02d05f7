"""A DDP training as a user writes it: script_ddp.py STEPS CHECKPOINTS [--fp16].

It averages its loss over the ranks, evaluates, which it marks for the heartbeat, and writes
checkpoints, which it does not mark. Mishaps are those of `tests.lab.mishaps`.
"""

import contextlib
import sys
import time

import torch
import torch.distributed as dist

from dshealthd.training import attach
from tests.lab.mishaps import Mishaps
from tests.lab.model import Network, batches

steps, checkpoints, *flags = sys.argv[1:]
fp16 = "--fp16" in flags
dist.init_process_group("gloo")
rank = dist.get_rank()
metrics = dist.new_group(backend="gloo")
torch.manual_seed(rank)
torch.set_num_threads(1)
mishaps = Mishaps()
model = torch.nn.parallel.DistributedDataParallel(Network(mishaps))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", enabled=fp16)
heartbeat = attach(optimizer=optimizer, model=model, scaler=scaler if fp16 else None)
loader = batches(mishaps)
last = time.perf_counter()
for step in range(1, int(steps) + 1):
    batch = next(loader)
    with torch.autocast("cpu", dtype=torch.float16) if fp16 else contextlib.nullcontext():
        prediction = model(batch).float()
    loss = (prediction - batch.sum(1, keepdim=True)).square().mean()
    # An auxiliary loss that is to vanish: its gradient at 0 is infinite.
    auxiliary = 0.0 if mishaps.happens("overflow") else 1e-3
    loss = loss + (auxiliary * prediction.square().mean()).sqrt()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    heartbeat.loss(loss)
    scaler.step(optimizer)
    scaler.update()
    now = time.perf_counter()
    print(f"rank {rank} step {step} seconds {now - last:.6f} loss {loss.item():.4f}", flush=True)
    last = now
    if step % 5 == 0 and not mishaps.happens("collective-skipped"):
        dist.all_reduce(loss.detach().clone(), group=metrics)
    if step % 300 == 0:
        with heartbeat.phase("evaluation"), torch.no_grad():
            model.eval()
            for _ in range(30):
                model.module(next(loader))
            model.train()  # type: ignore[no-untyped-call]
        last = time.perf_counter()
    if step % 500 == 0:  # the first rank writes, the others wait
        if rank == 0:
            torch.save(model.module.state_dict(), f"{checkpoints}/ddp.pt")
            time.sleep(2.0)
        dist.barrier()
dist.destroy_process_group()
