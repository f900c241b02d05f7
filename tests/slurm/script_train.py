"""A training of a user who knows of no heartbeat: script_train.py STEPS END.

It is started by srun or torchrun, makes so many steps, and stays until the file END is there.
"""

import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist

steps, end = int(sys.argv[1]), pathlib.Path(sys.argv[2])
rank = int(os.environ.get("RANK") or os.environ["SLURM_PROCID"])
size = int(os.environ.get("WORLD_SIZE") or os.environ["SLURM_NTASKS"])
dist.init_process_group("gloo", init_method=f"file://{end}.store", rank=rank, world_size=size)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for _ in range(steps):
    net(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
while not end.exists():
    time.sleep(0.1)
print(f"rank {rank} has trained", flush=True)
