"""A training that knows of no heartbeat: python script_site.py (ddp | fsdp2) STEPS."""

import importlib
import os
import pathlib
import sys
import threading
import time

import torch
import torch.distributed as dist

how, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(0)
net: torch.nn.Module = torch.nn.Sequential(
    torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1)
)
if how == "ddp":
    net = torch.nn.parallel.DistributedDataParallel(net)
elif how == "fsdp2":
    from torch.distributed.device_mesh import init_device_mesh

    name = "torch.distributed.fsdp"
    if not hasattr(importlib.import_module(name), "fully_shard"):  # torch 2.4 and 2.5
        name = "torch.distributed._composable.fsdp"
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    importlib.import_module(name).fully_shard(net, mesh=mesh)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
threads = threading.active_count()
for _ in range(steps):
    loss = net(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    assert threading.active_count() == threads
    print(f"rank {dist.get_rank()} loss {loss.item():.6f}", flush=True)
dist.destroy_process_group()
if "ENDS" in os.environ:  # its page is found before it is gone
    end = pathlib.Path(os.environ["ENDS"], str(os.getpid()))
    end.touch()
    while end.exists():
        time.sleep(0.01)
