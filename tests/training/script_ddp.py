"""A plain DDP training as a user writes it: python script_ddp.py STEPS.

Prints a line a step with its duration.
"""

import datetime as dt
import os
import sys
import time

import torch
import torch.distributed as dist

from dshealthd.training import attach

dist.init_process_group("gloo", timeout=dt.timedelta(seconds=60))
rank = dist.get_rank()
torch.manual_seed(rank)
torch.set_num_threads(1)
model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
heartbeat = attach(optimizer=optimizer, model=model)
last = time.perf_counter()
for step in range(int(sys.argv[1])):
    if step == 10:
        with heartbeat.phase("evaluation"), torch.no_grad():
            time.sleep(0.5)
        last = time.perf_counter()
    time.sleep(0.04)  # the input
    loss = model(torch.randn(16, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    heartbeat.loss(loss)
    optimizer.step()
    now = time.perf_counter()
    print(
        f"rank {rank} step {step + 1} seconds {now - last:.6f} loss {loss.item():.4f}", flush=True
    )
    last = now
if os.environ.get("LINGER"):
    time.sleep(float(os.environ["LINGER"]))
dist.destroy_process_group()
