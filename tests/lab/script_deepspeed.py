"""A DeepSpeed training as a user writes it: script_deepspeed.py STEPS CHECKPOINTS CONFIG (JSON).

It evaluates and writes checkpoints by the engine's own methods, and pauses for reasons that it does
not mark. Mishaps are those of `tests.lab.mishaps`.
"""

import json
import sys
import time

import deepspeed  # type: ignore[import-untyped]
import torch
import torch.distributed as dist

from dshealthd.training import attach
from tests.lab.mishaps import Mishaps
from tests.lab.model import Network, batches

steps, checkpoints, config = sys.argv[1:]
torch.set_num_threads(1)
# else it compiles an operator for collectives on the CPU at its first start
deepspeed.ops.__compatible_ops__ = {}
mishaps = Mishaps()
network = Network(mishaps)
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
engine, *_ = deepspeed.initialize(model=network, optimizer=optimizer, config=json.loads(config))
attach(engine)
rank = dist.get_rank()
metrics = dist.new_group(backend="gloo")
torch.manual_seed(rank)
loader = batches(mishaps)
last = time.perf_counter()
for step in range(1, int(steps) + 1):
    batch = next(loader)
    loss = (engine(batch) - batch.sum(1, keepdim=True)).square().mean()
    engine.backward(loss)
    engine.step()
    now = time.perf_counter()
    print(f"rank {rank} step {step} seconds {now - last:.6f} loss {loss.item():.4f}", flush=True)
    last = now
    if step % 5 == 0 and not mishaps.happens("collective-skipped"):
        dist.all_reduce(loss.detach().clone(), group=metrics)
    if step % 300 == 0:
        engine.eval()
        with torch.no_grad():
            for _ in range(30):
                engine(next(loader))
        engine.train()
        last = time.perf_counter()
    if step % 500 == 0:
        engine.save_checkpoint(checkpoints, tag="last")
        last = time.perf_counter()
    if step % 400 == 0 and rank == 0:
        time.sleep(
            1.5
        )  # tells somebody far away how it goes; the others wait at their next gradients
dist.destroy_process_group()
