"""A plain DDP training as a user writes it: python script_ddp.py STEPS.

Prints a line a step with bounds of its duration. Once there is the file that STOP in its
environment names, rank 1 stops itself in the input of a step, as a debugger or SIGSTOP from outside
would.
"""

import datetime as dt
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from dshealthd.training import attach
from tests.training.step_clock import StepClock

dist.init_process_group("gloo", timeout=dt.timedelta(seconds=600))
rank = dist.get_rank()
torch.manual_seed(rank)
torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
clock = StepClock()
optimizer.register_step_post_hook(lambda *_: clock.step_ends())
heartbeat = attach(optimizer=optimizer, model=model)
net.register_forward_pre_hook(lambda *_: clock.input_ends())
evaluate = clock.paused(time.sleep)
for step in range(int(sys.argv[1])):
    if step == 10:
        with heartbeat.phase("evaluation"), torch.no_grad():
            evaluate(0.5)
        clock.resumed()
    time.sleep(0.04)  # the input
    if rank == 1 and os.path.exists(stop := os.environ.get("STOP", "")):
        os.unlink(stop)
        os.kill(os.getpid(), signal.SIGSTOP)
    loss = model(torch.randn(16, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    heartbeat.loss(loss)
    optimizer.step()
    print(f"rank {rank} step {step + 1} {clock.line()} loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
