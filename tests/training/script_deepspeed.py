"""A DeepSpeed training as a user writes it: python script_deepspeed.py STEPS CONFIG.

Prints a line a step with bounds of its duration.
"""

import json
import os
import sys
import time

import deepspeed  # type: ignore[import-untyped] # it has no types
import torch

from dshealthd.training import attach
from tests.training.step_clock import StepClock

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
clock = StepClock()
engine_step = engine.step


def step_engine() -> None:
    """Make a step or micro-step, and note its end before the heartbeat does."""
    engine_step()
    clock.step_ends()


engine.step = step_engine
engine.save_checkpoint = clock.paused(engine.save_checkpoint)
attach(engine)
model.register_forward_pre_hook(lambda *_: clock.input_ends())
rank = torch.distributed.get_rank()
torch.manual_seed(rank)
for step in range(int(sys.argv[1])):
    for _ in range(engine.gradient_accumulation_steps()):
        time.sleep(0.02)  # the input
        loss = engine(torch.randn(16, 64, dtype=dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
    print(f"rank {rank} step {step + 1} {clock.line()} loss {loss.item():.4f}", flush=True)
    if step == 10:
        engine.save_checkpoint(os.environ["CHECKPOINTS"])
        clock.resumed()
if os.environ.get("LINGER"):
    time.sleep(float(os.environ["LINGER"]))
torch.distributed.destroy_process_group()
