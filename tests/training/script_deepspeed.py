"""A DeepSpeed training as a user writes it: python script_deepspeed.py STEPS CONFIG.

Prints a line a step with its duration.
"""

import json
import os
import sys
import time

import deepspeed  # type: ignore[import-untyped] # it has no types
import torch

from dshealthd.training import attach

# else it compiles an operator for collectives on the CPU at its first start
deepspeed.ops.__compatible_ops__ = {}
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    config=json.loads(sys.argv[2]),
)
dtype = next(engine.parameters()).dtype
attach(engine)
rank = torch.distributed.get_rank()
torch.manual_seed(rank)
last = time.perf_counter()
for step in range(int(sys.argv[1])):
    for _ in range(engine.gradient_accumulation_steps()):
        time.sleep(0.02)  # the input
        loss = engine(torch.randn(16, 64, dtype=dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
    now = time.perf_counter()
    print(
        f"rank {rank} step {step + 1} seconds {now - last:.6f} loss {loss.item():.4f}", flush=True
    )
    last = now
    if step == 10:
        engine.save_checkpoint(os.environ["CHECKPOINTS"])
        last = time.perf_counter()
if os.environ.get("LINGER"):
    time.sleep(float(os.environ["LINGER"]))
torch.distributed.destroy_process_group()
